"""`nanochat up` as a person meets it: a fresh home, a password, what dies comes back."""

import re
import urllib.error
import urllib.request

import pytest

from tests.support.infra.stack.live import PASSWORD, LiveStack

pytestmark = [pytest.mark.prefect, pytest.mark.timeout(600)]


def test_up_says_where_the_pages_are_and_what_to_do_next(live: LiveStack) -> None:
    again = live.nanochat("up")

    assert again.returncode == 0, again.stderr
    assert "it is up already" in again.stdout
    assert str(live.record.ui_url) in again.stdout
    assert "cpu (runs at once: 6), gpu (runs at once: 1)" in again.stdout
    assert "nanochat run tiny" in again.stdout


def test_a_second_up_starts_nothing(live: LiveStack) -> None:
    before = live.record, len(live.processes())

    assert live.nanochat("up").returncode == 0

    assert (live.record, len(live.processes())) == before


def test_a_taken_port_is_passed_over(live: LiveStack) -> None:
    port = int(str(live.record.ui_url).rpartition(":")[2])

    assert live.taken_port < port < live.taken_port + 100


def test_up_does_not_pretend_to_be_on_another_port(live: LiveStack) -> None:
    done = live.nanochat("up", "--port", "4799")

    assert done.returncode == 1
    assert "not on port 4799" in done.stderr
    assert "nanochat down" in done.stderr


def test_a_fresh_home_has_no_traceback_in_its_logs(live: LiveStack) -> None:
    logs = {log.stem: log.read_text() for log in (live.home / "prefect").glob("*.log")}

    # SQLite may refuse one of two that write at once; the server says so at length, and repeats it.
    assert unexcused(logs.pop("server")) == []
    assert set(logs) == {"supervisor", "register", "worker-cpu", "worker-gpu"}
    assert not [name for name, text in logs.items() if "Traceback" in text]


def unexcused(log: str) -> list[str]:
    """The tracebacks of a log but those that say themselves that SQLite was locked."""
    _, *each = re.split(r"^.*Traceback \(most recent call last\):$", log, flags=re.MULTILINE)
    locked = re.compile(
        r"^\W*(sqlite3\.OperationalError:|sqlalchemy\.exc\.OperationalError: "
        r"\(sqlite3\.OperationalError\)) database is locked",
        flags=re.MULTILINE,
    )
    return [text for text in each if not locked.search(text)]


def test_a_locked_database_excuses_its_own_tracebacks_only() -> None:
    began = "Traceback (most recent call last):\n  File 'x.py', line 1\n"
    locked = (
        f"{began}sqlite3.OperationalError: database is locked\n\n"
        "The above exception was the direct cause of the following exception:\n\n"
        f"{began}sqlalchemy.exc.OperationalError: (sqlite3.OperationalError) database is locked\n"
        "[SQL: UPDATE]\n"
    )
    other = f"20:01 | ERROR | {began}ValueError: after the database is locked\n"

    assert unexcused(f"one\n{locked}two\n{locked}") == []
    assert len(unexcused(locked + other)) == 1
    assert len(unexcused(other + locked + other)) == 2
    assert unexcused("") == []


def test_all_deployments_are_registered(live: LiveStack) -> None:
    names = {item["name"] for item in live.ask("/deployments/filter", {})}

    assert {"nanochat", "gpu", "main", "miniseries"} <= names


def test_no_client_gets_in_without_the_password(live: LiveStack) -> None:
    url = f"{live.record.api_url}/admin/version"

    with pytest.raises(urllib.error.HTTPError, match="401"):
        urllib.request.urlopen(url)
    assert live.ask("/admin/version")


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ("nanochat:wrong", "refuses NANOCHAT_PREFECT_AUTH"),
        ("", "asks for a password"),
        ("nobody", "is not user:password"),
    ],
)
def test_a_wrong_password_is_one_line_with_a_hint(live: LiveStack, given: str, said: str) -> None:
    done = live.nanochat("up", NANOCHAT_PREFECT_AUTH=given)

    assert done.returncode == 1
    error, hint = done.stderr.splitlines()
    assert error.startswith("error: ")
    assert said in error
    assert hint.startswith("hint: ")


def test_the_password_is_in_no_command_line_and_no_file(live: LiveStack) -> None:
    words = [" ".join(process.cmdline()) for process in live.processes()]
    files = [path for path in (live.home / "prefect").rglob("*") if path.is_file()]

    assert len(words) >= 4  # supervisor, server, two workers
    assert not [line for line in words if PASSWORD in line]
    assert not [path for path in files if PASSWORD.encode() in path.read_bytes()]


def test_a_run_of_a_deployment_works_with_the_password(live: LiveStack) -> None:
    run = live.start_toy("guarded")
    live.finish_toy("guarded")

    live.wait_for_state(run, "Completed")
