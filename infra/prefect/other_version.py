"""Refuse a home whose server or keeper was started by another version of nanochat-flows.

A record of another format cannot be used to end its process. Two servers would damage one SQLite
file, and a keeper (the supervisor process) restarts its server and ends the processes of another
keeper's workers.
"""

import json
from pathlib import Path

import psutil

from infra.prefect.access import ServerError
from infra.prefect.supervisor_record import FORMAT as STACK_FORMAT
from infra.prefect.supervisor_record import record_path


def check_no_other_version(home: Path, server: Path, *, format: int) -> None:
    """Raise ServerError if a keeper or server of another version runs.

    `server` is the path of the server's record, `format` its format in this version.
    """
    _check(record_path(home), STACK_FORMAT, "up", f"the keeper of {home}")
    _check(server, format, "prefect", f"the Prefect server of {home}")


def _check(path: Path, format: int, word: str, what: str) -> None:
    """Raise ServerError if the record is of another format and its process lives."""
    try:
        # Another version's way to identify a process is unknown: `word` in the command line guards
        # against a pid that was reused by another program.
        tree = json.loads(path.read_text(encoding="utf-8"))
        if tree["format"] == format or word not in psutil.Process(tree["pid"]).cmdline():
            return
    except (OSError, ValueError, TypeError, KeyError, psutil.Error):  # no record, or it has ended
        return
    raise ServerError(
        f"process {tree['pid']} is {what}, started by another version",
        hint=f"`nanochat down` of that version ends it, or: kill {tree['pid']}",
    )
