"""`nanochat config`: print the settings of a profile, as a file that can be edited and run."""

import sys

from flows.cli.options import AsJson, ProfileName, SettingOptions
from flows.cli.output import print_json
from flows.cli.recipes import read_recipe
from flows.profile_file import resolved_settings, to_toml
from flows.run_request import NamedRecipe


def config(
    profile: ProfileName,
    /,
    *,
    what: SettingOptions = SettingOptions(),  # noqa: B008 - frozen
    as_json: AsJson = False,
) -> int:
    """Print every setting of a profile as TOML: edit a copy, then run it like a profile.

    `nanochat config tiny > my.toml`, then `nanochat run my.toml`.
    """
    name, recipe = read_recipe(profile, NamedRecipe(depth=what.depth, overrides=what.overrides))
    if as_json:
        settings = resolved_settings(name, recipe)
        head = {"profile": name, "name": recipe.run_name, "depth": recipe.depth}
        print_json({**head, "settings": settings})
    else:
        sys.stdout.write(to_toml(name, recipe))
    return 0
