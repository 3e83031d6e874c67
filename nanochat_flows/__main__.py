"""Start the command line: `nanochat` and `python -m nanochat_flows` begin here.

Nothing of ours is imported before `check_packages` has found it where this file is installed.
"""

import os
import sys

from nanochat_flows.packages import check_packages


def main() -> int:
    """Run the command line, unless a package would come from elsewhere; return the exit code."""
    try:
        check_packages()
    except ImportError as error:
        sys.stderr.write(f"error: {error}\n")
        return 1
    # Engines, workers and flows are started with `python -m`, which would look into the current
    # directory first.
    os.environ["PYTHONSAFEPATH"] = "1"
    from flows.cli.app import main as run

    return run()


if __name__ == "__main__":
    sys.exit(main())
