"""`nanochat completion`: print the script with which a shell completes commands and options."""

import sys
from typing import Annotated, Literal

from cyclopts import Parameter


def completion(
    shell: Annotated[Literal["bash", "zsh", "fish"], Parameter(help="Name of the shell.")], /
) -> int:
    """Print a script that lets a shell complete commands and options.

    bash: `nanochat completion bash > ~/.local/share/bash-completion/completions/nanochat`

    zsh: `nanochat completion zsh > ~/.zfunc/_cyclopts_nanochat`, where `fpath` has ~/.zfunc

    fish: `nanochat completion fish > ~/.config/fish/completions/nanochat.fish`

    Create the directory first. The script lists the commands of this version: write it again after
    an upgrade.
    """
    from flows.cli.app import make_app

    sys.stdout.write(make_app().generate_completion(shell=shell))
    return 0
