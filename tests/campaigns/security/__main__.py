"""Rerun the security campaign: `python -m tests.campaigns.security [PART ...]`.

A part is a module of this package with `run() -> list[Row]`, named in `PARTS`. Without arguments
all parts run, in this order. FUZZ_REQUESTS is the number of requests of `http`. Prints one table,
then each attempt that got through; exits with 1 if any did.
"""

import argparse
import importlib
import sys

from tests.campaigns.security.rows import Row

PARTS = ("sandbox", "records", "store", "model", "http", "page", "prefect")


def render(rows: list[Row]) -> str:
    """Return the rows as a Markdown table, followed by what got through."""
    lines = ["| part | attempts | held | got through | seconds |", "|---|---:|---:|---:|---:|"]
    for row in rows:
        through = len(row.got_through)
        held = row.attempts - through
        lines.append(f"| {row.part} | {row.attempts} | {held} | {through} | {row.seconds:.0f} |")
    return "\n".join([*lines, *(f"{row.part}: {what}" for row in rows for what in row.got_through)])


def main() -> int:
    """Run the parts that the command line names, or all; return the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.campaigns.security", description=(__doc__ or "").split("\n")[0]
    )
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"of {', '.join(PARTS)}")
    parts = parser.parse_args().parts or PARTS
    if unknown := set(parts) - set(PARTS):
        parser.error(f"no part {', '.join(sorted(unknown))}; there is {', '.join(PARTS)}")
    modules = [importlib.import_module(f"tests.campaigns.security.{part}") for part in parts]
    rows = [row for module in modules for row in module.run()]
    print(render(rows))
    return 1 if any(row.got_through for row in rows) else 0


if __name__ == "__main__":
    sys.exit(main())
