"""`python -m infra.launch.agent`: torchrun, ended by the kernel when its parent dies.

torchrun alone survives its parent and leaves its ranks training; nobody would fetch the result.
"""

import os
import sys

from infra.launch.torchrun import LAUNCHER_VARIABLE
from nanochat_core.worker import die_with_parent


def main() -> None:
    """Run torchrun with this process's arguments."""
    launcher = os.environ.get(LAUNCHER_VARIABLE)
    die_with_parent()
    if launcher is not None and os.getppid() != int(launcher):  # it died while we started
        sys.exit(1)
    os.environ[LAUNCHER_VARIABLE] = str(os.getpid())

    from torch.distributed.run import main as torchrun  # pyright: ignore[reportUnknownVariableType]

    torchrun()


if __name__ == "__main__":
    main()
