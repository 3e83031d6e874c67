"""`python -m infra.launch.agent`: torchrun, ended by the kernel when its parent dies.

torchrun alone survives its parent and leaves its ranks training; nothing would fetch the result.
"""

import os

from nanochat_core.worker import LAUNCHER_VARIABLE, die_with_parent


def main() -> None:
    """Run torchrun with this process's arguments."""
    die_with_parent()
    os.environ[LAUNCHER_VARIABLE] = str(os.getpid())

    from torch.distributed.run import main as torchrun  # pyright: ignore[reportUnknownVariableType]

    from infra.launch.loopback import register

    register()
    torchrun()


if __name__ == "__main__":
    main()
