"""Refuse a home whose server or keeper was started by another version of nanochat-flows.

A record of another format cannot be used to end its process. Two servers would damage one SQLite
file, and a keeper starts its server again and ends the processes of another one's workers.
"""

import json
from pathlib import Path

import psutil

from infra.prefect.access import ServerError
from infra.prefect.supervisor_record import FORMAT as STACK_FORMAT
from infra.prefect.supervisor_record import record_path


def check_no_other_version(home: Path, server: Path, *, format: int) -> None:
    """Raise ServerError if another version's keeper or server lives; `server` is the record of one.

    `format` is that of the server's records today.
    """
    _check(record_path(home), STACK_FORMAT, "up", f"the keeper of {home}")
    _check(server, format, "prefect", f"the Prefect server of {home}")


def _check(path: Path, format: int, word: str, what: str) -> None:
    """Raise ServerError if the record is of another format and its process lives.

    `word` is in the command line of such a process, unless its number was reused.
    """
    try:
        tree = json.loads(path.read_text(encoding="utf-8"))
        if tree["format"] == format or word not in psutil.Process(tree["pid"]).cmdline():
            return
    except (OSError, ValueError, TypeError, KeyError, psutil.Error):  # none, or it has ended
        return
    raise ServerError(
        f"process {tree['pid']} is {what}, started by another version",
        hint=f"`nanochat down` of that version ends it, or: kill {tree['pid']}",
    )
