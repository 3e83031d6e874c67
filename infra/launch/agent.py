"""`python -m infra.launch.agent`: torchrun, ended by the kernel when its parent dies.

Plain torchrun survives its parent, and its ranks train on although no process fetches the result.
"""

import os

from nanochat_core.worker import LAUNCHER_VARIABLE, die_with_parent


def main() -> None:
    """Run torchrun with this process's arguments."""
    # Before torch is imported, which takes seconds: until then torchrun would outlive its parent.
    die_with_parent()
    # The ranks' parent is this process: each compares it with its own to notice an early death.
    os.environ[LAUNCHER_VARIABLE] = str(os.getpid())

    from torch.distributed.run import main as torchrun  # pyright: ignore[reportUnknownVariableType]

    from infra.launch.loopback import register

    register()
    torchrun()


if __name__ == "__main__":
    main()
