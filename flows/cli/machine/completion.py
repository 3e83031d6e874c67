"""`nanochat completion`: print the script with which a shell completes commands and options."""

import sys
from typing import Literal


def completion(
    shell: Literal["bash", "zsh", "fish"],
    /,
) -> None:
    """Print a script that lets a shell complete commands and options.

    bash: `nanochat completion bash > ~/.local/share/bash-completion/completions/nanochat`

    zsh: `nanochat completion zsh > ~/.zfunc/_cyclopts_nanochat`, where `fpath` has ~/.zfunc

    fish: `nanochat completion fish > ~/.config/fish/completions/nanochat.fish`

    Create the directory first. The script lists the commands of this version: write it again after
    an upgrade.

    Args:
        shell: Name of the shell.
    """
    from flows.cli.app import make_app

    sys.stdout.write(make_app().generate_completion(shell=shell))
