"""Start the command line: `nanochat` and `python -m nanochat_flows` begin here.

Nothing of ours is imported before `check_packages` has found it where this file is installed.
"""

import gc
import os
import sys

from nanochat_flows.packages import check_packages

_OBJECTS = 50_000  # more objects than freed ones before the collector looks at the young ones


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
    # What imports make stays: the collector would look at it again and again, for a tenth of the
    # time of `nanochat plan`.
    gc.set_threshold(_OBJECTS)
    from flows.cli.app import main as run

    return run()


if __name__ == "__main__":
    sys.exit(main())
