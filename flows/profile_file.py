"""Read and write profiles as TOML files: a built-in profile, and settings that replace its own.

    profile = "tiny"        # the profile whose settings hold where the file has none
    name = "mine"           # of the run
    depth = 4
    data = "letters"        # text to pretrain on: a folder, relative to the file, hf://... or s3://...

    [pretrain]
    num_steps = 100

A command reads the file on its own machine and continues as if the settings that differ from the
profile's had been given with --set: runs, records and workers know nothing of the file. TOML has no
null: "null" stands for it, and a group in a list may leave it out.
"""

import json
import math
import tomllib
import types
import typing
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

from flows.identity.fingerprint import single_settings
from flows.overrides import changed_settings
from flows.profiles import open_profile, setting_types
from flows.run_request import RunRequest, absolute_text, text_settings
from nanochat_core.config import RunConfig
from nanochat_core.errors import ConfigError, reason_of
from nanochat_core.section import Section, Tree
from tasks.user_files import FileFault, read_text

_KEYS = {"profile": str, "name": str, "depth": int, "data": str}  # that are no settings
_COMPUTED = "shards.snapshot"  # taken from this machine, unless it was set


def read_profile_file(path: Path, *, depth: int | None = None) -> RunRequest:
    """Return the run that a file asks for; `depth` replaces the file's. Raises ConfigError.

    The file's settings are overrides, without those of the profile's own value.
    """
    tree = _parse(path)
    try:
        keys = {name: _take(tree, name, kind) for name, kind in _KEYS.items()}
        profile, depth = keys["profile"], keys["depth"] if depth is None else depth
        if profile is None:
            raise ConfigError("it names no profile", hint='its first line is like profile = "tiny"')
        overrides = tuple(_overrides(tree, path.parent, depth))
        changed = changed_settings(RunRequest(profile=profile, depth=depth, overrides=overrides))
        if keys["data"] is not None:
            changed |= _text(changed, keys["data"], path.parent)
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}", hint=error.hint) from error
    return RunRequest(
        profile=profile,
        depth=depth,
        run_name=keys["name"],
        overrides=tuple(f"{name}={_as_override(value)}" for name, value in changed.items()),
    )


def _parse(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(read_text(path))
    except OSError as error:
        raise ConfigError(
            f"{path} cannot be read: {reason_of(error)}",
            hint=f"write one: nanochat config tiny > {path}",
        ) from error
    except FileFault as error:
        raise ConfigError(str(error), hint=error.hint) from error
    except (ValueError, RecursionError) as error:  # no TOML, or nested too deeply
        raise ConfigError(
            f"{path} is not TOML: {error}", hint="`nanochat config tiny` prints an example"
        ) from error


def _take(tree: dict[str, Any], name: str, kind: type) -> Any:
    """Remove and return a value that is no setting; None means that the file has none."""
    value = tree.pop(name, None)
    if value is not None and type(value) is not kind:
        raise ConfigError(f"{name} is {value!r}, expected {kind.__name__}")
    return value


def _overrides(tree: Mapping[str, Any], folder: Path, depth: int | None) -> Iterator[str]:
    """Yield the settings of a file as overrides of a profile at `depth`."""
    settings, kinds = dict(single_settings(tree)), setting_types()
    if depth is not None and (of_sizes := settings.get("model.depth", depth)) != depth:
        raise ConfigError(
            f"depth is {depth}, but its settings are those of depth {of_sizes}",
            hint=f"write the settings of that depth again: nanochat config PROFILE --depth {depth}",
        )
    for name, value in settings.items():
        whole = _below(folder, name, value, source=settings.get("shards.source"))
        yield f"{name}={_as_override(_with_nulls(kinds.get(name), whole))}"


def _below(folder: Path, name: str, value: Any, *, source: Tree) -> Any:
    """Return the value of a setting with its paths, which are relative to `folder`, absolute."""
    if name == "task_data.datasets" and isinstance(value, list):
        return [_with_path(folder, item) for item in cast("list[Any]", value)]
    is_text = name == "shards.path" and source == "local"
    is_mixture = name.endswith(".mixture") and str(value).endswith(".toml")
    return _absolute(folder, value) if is_text or is_mixture else value


def _with_path(folder: Path, dataset: Any) -> Any:
    if not (isinstance(dataset, dict) and "path" in dataset):
        return cast(Any, dataset)
    entry = cast("dict[str, Any]", dataset)
    return entry | {"path": _absolute(folder, entry["path"])}


def _absolute(folder: Path, path: Any) -> Any:
    return absolute_text(path, folder) if isinstance(path, str) and path != "null" else path


def _as_override(value: Any) -> str:
    """Return a value as it stands behind `=` in --set."""
    return value if isinstance(value, str) else json.dumps(value, default=str)


def _text(changed: Mapping[str, Tree], data: str, folder: Path) -> dict[str, str]:
    """Return the settings that `data` in a file of `folder` stands for."""
    for name in ("shards.path", "shards.source"):
        if name in changed:
            raise ConfigError(
                f"{name} is set twice: by data, and to {changed[name]}",
                hint="leave one of them out",
            )
    return text_settings(_absolute(folder, data))


def _with_nulls(kind: Any, value: Any) -> Any:
    """Return the value with null for what is missing in its groups: TOML has no null."""
    if typing.get_origin(kind) is tuple and isinstance(value, list):
        item = typing.get_args(kind)[0]
        return [_with_nulls(item, each) for each in cast("list[Any]", value)]
    if isinstance(kind, type) and issubclass(kind, Section) and isinstance(value, dict):
        hints = typing.get_type_hints(kind)
        nulls = {name: None for name, hint in hints.items() if isinstance(hint, types.UnionType)}
        given = cast("dict[str, Any]", value).items()
        return nulls | {name: v for name, v in given if v != "null" or name not in nulls}
    return value


# Writing.


def to_toml(request: RunRequest) -> str:
    """Return the resolved settings of a run as a file that can be edited and run."""
    profile, depth = request.profile, request.depth
    lines = [
        f"# Settings of the profile {profile}. Change what you like, then: nanochat run FILE.toml",
        "# A setting that is left out has the profile's value. docs/reference/config.md has all.",
        f"profile = {_value(profile)}",
        f"name = {_value(request.run_name)}" if request.run_name else '# name = "mine"',
        *([] if depth is None else [f"depth = {depth}"]),
        '# data = "/path/to/a/folder/of/text"',
        "",
        *_group(resolved_settings(request), "", RunConfig, changed_settings(request)),
    ]
    return "\n".join(lines) + "\n"


def changes_to_toml(request: RunRequest, run: RunConfig, *, name: str, about: Sequence[str]) -> str:
    """Return what `run` changes of the profile of `request` as a file; `about` are comments."""
    base = open_profile(request.profile, depth=request.depth, snapshots=False).run
    before, groups = dict(single_settings(base.tree())), dict[str, dict[str, Tree]]()
    for setting, value in single_settings(run.tree()):
        if value != before[setting]:
            group, _, field = setting.rpartition(".")
            groups.setdefault(group, {})[field] = "null" if value is None else value
    head: dict[str, Tree] = {"profile": request.profile, "name": name}
    head |= {} if request.depth is None else {"depth": request.depth}
    lines = [f"# {line}" for line in about]
    for group, settings in {"": head | groups.pop("", {}), **groups}.items():
        lines += ["", f"[{group}]"] if group else []
        lines += [f"{name} = {_value(value)}" for name, value in settings.items()]
    return "\n".join(lines) + "\n"


def resolved_settings(request: RunRequest) -> dict[str, Tree]:
    """Return all settings of a run as a tree. Raises ConfigError."""
    profile, depth, overrides = request.profile, request.depth, request.overrides
    tree = open_profile(profile, depth=depth, overrides=overrides, snapshots=False).run.tree()
    if _COMPUTED not in changed_settings(request):
        cast("dict[str, Tree]", tree["shards"]).pop("snapshot")
    return tree


def _group(
    tree: Mapping[str, Tree], prefix: str, kind: type[Section], changed: Collection[str]
) -> Iterator[str]:
    """Yield single settings, then groups, each with what it is as a comment."""
    for name, value in tree.items():
        if value is None:
            yield f'{"" if f"{prefix}{name}" in changed else "# "}{name} = "null"'
        elif not isinstance(value, dict):
            yield f"{name} = {_value(value)}"
    hints = typing.get_type_hints(kind)
    for name, value in tree.items():
        if isinstance(value, dict):
            yield ""
            yield f"# {(hints[name].__doc__ or '').partition(chr(10))[0]}"
            yield f"[{prefix}{name}]"
            yield from _group(value, f"{prefix}{name}.", hints[name], changed)


def _value(value: Tree) -> str:
    match value:
        case bool():
            return "true" if value else "false"
        case str():
            # JSON's escapes are TOML's too, but for the one character that JSON leaves as it is.
            return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
        case float() if math.isfinite(value):
            return repr(value)
        case list():
            items = [_value(item) for item in value]
            if any(isinstance(item, dict) for item in value):
                return "".join(["[\n", *(f"    {item},\n" for item in items), "]"])
            return f"[{', '.join(items)}]"
        case dict():
            pairs = (f"{name} = {_value(item)}" for name, item in value.items() if item is not None)
            return f"{{ {', '.join(pairs)} }}"
        case _:
            return str(value)
