"""Names upstream that move are resolved, pinned in what is hashed, and remembered."""

import dataclasses
import json
import subprocess
import sys
from collections.abc import Generator
from pathlib import Path

import pytest
from huggingface_hub import constants

from flows.artifacts.runs import write_run
from flows.cli.app import main
from flows.identity.fingerprint import REPOSITORY, Code, identify
from flows.orchestration.flow_setup import find_record
from flows.plan.upstream import FILE, SECTIONS, Pins, moving_names, pin, recorded_pins
from flows.profiles import open_profile
from flows.stages import SHARDS, STAGES, TASK_DATA, Stage
from infra.storage.local import LocalStore
from nanochat_core.config import RunConfig
from nanochat_core.data.hub.datasets import DATASETS
from nanochat_core.errors import ConfigError, DataError
from tests.support.flows.house import make_run
from tests.support.nanochat_core.data.hub_server import HubServer, talking_to_hub
from tests.support.nanochat_core.data.web_server import WebServer

TEXT = DATASETS["climbmix"].repository
TALKS = "HuggingFaceTB/smol-smoltalk"
CODE = Code(REPOSITORY)
RUN = dataclasses.replace(make_run("d12-1"), name="d12", profile="d12")


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Generator[HubServer]:
    """A Hub with both datasets of d12 that are named by a branch."""
    with talking_to_hub(tmp_path / "hf-home", monkeypatch) as server:
        server.add(TEXT, {"a": b"1"})
        server.add(TALKS, {"b": b"1"})
        yield server


def d12(bundle: str | None = None) -> RunConfig:
    run = open_profile("d12").run
    return dataclasses.replace(
        run, task_data=dataclasses.replace(run.task_data, core_bundle=bundle)
    )


class Home:
    """A home, what was resolved in it and what was said."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.said: list[str] = []

    def pin(self, run: RunConfig, *, known: Pins | None = None, plan: bool = False) -> RunConfig:
        run, self.pins = pin(run, self.path, log=self.said.append, known=known, plan=plan)
        return run


def age(home: Path, when: str = "2026-01-01T00:00:00Z") -> None:
    """Date the answers that the home stores."""
    tree = json.loads((home / FILE).read_text())
    for answer in tree["answers"].values():
        answer["when"] = when
    (home / FILE).write_text(json.dumps(tree))


@pytest.fixture
def home(tmp_path: Path) -> Home:
    return Home(tmp_path / "home")


def fingerprint(stage: Stage, run: RunConfig) -> str:
    return identify(stage, run, {}, code=CODE).fingerprint


def unplug(hub: HubServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    hub.close()


def test_a_branch_is_pinned_to_its_commit_in_the_configuration_that_is_hashed(hub, home):
    run = home.pin(d12())
    first = run.shards.revision
    assert first is not None
    assert home.pins[f"{TEXT}@main"] == first
    assert [d.revision for d in run.task_data.datasets if d.name == "smoltalk"] == [
        home.pins[f"{TALKS}@main"]
    ]
    assert moving_names(run) == ()
    moved = hub.add(TEXT, {"a": b"2"})
    again = home.pin(d12())
    assert again.shards.revision == moved != first
    assert fingerprint(SHARDS, again) != fingerprint(SHARDS, run)
    assert fingerprint(TASK_DATA, again) == fingerprint(TASK_DATA, run)
    assert home.said == []


def test_each_name_is_one_request_and_what_is_known_is_none(hub, home):
    assert moving_names(d12()) == (f"{TEXT}@main", f"{TALKS}@main")
    home.pin(d12())
    assert len(hub.requests) == 2
    pins = home.pins
    hub.add(TEXT, {"a": b"2"})
    run = home.pin(d12(), known=pins)
    assert len(hub.requests) == 2
    assert run.shards.revision == pins[f"{TEXT}@main"]


def test_without_a_network_the_last_commit_is_used_and_its_date_said(hub, home, monkeypatch):
    before = home.pin(d12())
    age(home.path)
    unplug(hub, monkeypatch)
    for plan in (True, False):
        home.said.clear()
        assert home.pin(d12(), plan=plan) == before
        assert len(home.said) == 2
        commit = str(before.shards.revision)[:12]
        assert home.said[0].startswith(f"{TEXT}@main is taken to be {commit}, as resolved 20")


def test_never_resolved_and_offline_a_plan_says_so_and_a_run_is_refused(hub, home, monkeypatch):
    unplug(hub, monkeypatch)
    assert home.pin(d12(), plan=True) == d12()
    assert [text.partition(" (")[0] for text in home.said] == [
        f"{TEXT}@main is not resolved",
        f"{TALKS}@main is not resolved",
    ]
    with pytest.raises(ConfigError, match=f"what {TEXT}@main stands for is not known") as error:
        home.pin(d12())
    assert "run once with a network" in (error.value.hint or "")
    assert "\n" not in str(error.value)


def test_a_branch_that_does_not_exist_is_an_error_also_in_a_plan(hub, home):
    run = open_profile("d12", overrides=["shards.revision=gone", "task_data.core_bundle=null"]).run
    with pytest.raises(DataError, match=f"{TEXT} has no such revision"):
        home.pin(run, plan=True)


def test_the_bundle_is_pinned_to_the_sha256_of_its_download(hub, home):
    with WebServer(b"one bundle") as web:
        run = d12(web.url)
        assert home.pin(run, plan=True).task_data.core_bundle_sha256 is None
        assert f"{web.url} is not resolved" in home.said[-1]
        assert web.gets == 0  # a plan downloads nothing
        first = home.pin(run)
        assert first.task_data.core_bundle_sha256 is not None
        assert home.pin(run, plan=True) == home.pin(run) == first
        assert web.gets == 1
        web.data = b"another bundle"
        age(home.path)
        home.said.clear()
        assert (
            home.pin(run, plan=True).task_data.core_bundle_sha256 is None
        )  # the server has another
        assert f"{web.url} is not resolved" in home.said[-1]
        other = home.pin(run)
    assert web.gets == 2
    assert fingerprint(TASK_DATA, other) != fingerprint(TASK_DATA, first)
    home.said.clear()
    assert home.pin(run) == other  # the server is gone
    assert "is taken to be" in home.said[-1]


def test_another_home_takes_the_bundle_that_was_downloaded(hub, home, tmp_path):
    elsewhere = Home(tmp_path / "another home")
    with WebServer(b"one bundle") as web:
        first = home.pin(d12(web.url))
        assert elsewhere.pin(d12(web.url), plan=True) == first
    assert elsewhere.said == []
    (elsewhere.path / FILE).unlink()
    assert elsewhere.pin(d12(web.url)) == first  # the server is gone
    assert "is taken to be" in elsewhere.said[-1]


def test_a_server_that_says_nothing_of_its_bundle_is_asked_for_its_bytes_by_every_run(hub, home):
    with WebServer(b"one bundle") as web:
        web.has_validator = False
        first = home.pin(d12(web.url))
        web.data = b"another bundle"
        other = home.pin(d12(web.url))
    assert other.task_data.core_bundle_sha256 != first.task_data.core_bundle_sha256
    assert web.gets == 2


def test_a_bundle_that_cannot_be_resolved_may_be_given_by_its_sha256(hub, home):
    with WebServer(b"one bundle") as web:
        run = d12(web.url)
    with pytest.raises(ConfigError, match="stands for is not known") as error:
        home.pin(run)
    hint = error.value.hint or ""
    setting = "--set task_data.core_bundle_sha256=SHA256"
    assert 0 < hint.index(setting) < hint.index("--set task_data.core_bundle=null")
    data = dataclasses.replace(run.task_data, core_bundle_sha256="a" * 64)
    given = home.pin(dataclasses.replace(run, task_data=data))
    assert given.task_data.core_bundle_sha256 == "a" * 64


def test_a_second_plan_within_ten_minutes_sends_no_request(hub, home):
    with WebServer(b"one bundle") as web:
        run = d12(web.url)
        home.pin(run)
        requests = len(hub.requests), web.heads
        assert moving_names(home.pin(run, plan=True)) == ()
        assert (len(hub.requests), web.heads) == requests
        for when in ("2026-01-01T00:00:00Z", "2999-01-01T00:00:00Z"):
            age(home.path, when)
            requests = len(hub.requests) + 2, web.heads + 1
            for _ in range(2):  # then the answers are of today again
                home.pin(run, plan=True)
                assert (len(hub.requests), web.heads) == requests


def test_a_run_that_resumes_keeps_what_its_record_has_pinned_unless_it_is_damaged(
    hub, home, tmp_path
):
    store = LocalStore(tmp_path / "store")

    def pins_of(run_id: str) -> Pins:
        record = find_record(store, run_id, log=home.said.append)
        home.pin(d12(), known=record.upstream if record else {})
        return home.pins

    first = pins_of("d12-1")
    write_run(store, dataclasses.replace(RUN, upstream=first))
    hub.add(TEXT, {"a": b"2"})
    assert pins_of("d12-1") == first
    store.put("runs/d12-1.json", b"half of a rec")
    assert pins_of("d12-1") == pins_of("d12-2") != first
    (said,) = home.said
    assert "runs/d12-1.json is damaged" in said
    assert said.endswith("names upstream are resolved again")


def test_the_newest_run_of_a_profile_that_names_a_branch_has_its_pin(tmp_path):
    store = LocalStore(tmp_path / "store")
    for run, profile, upstream in (
        ("mine-20260101t000000z-0001", "d12", {"a@main": "1", "b@main": "2"}),
        ("d12-20260102t000000z-0001", "d12", {"a@main": "3"}),
        ("d20-20260103t000000z-0001", "d20", {"a@main": "4"}),
    ):
        started = f"2026-01-0{upstream['a@main']}T00:00:00Z"
        record = dataclasses.replace(RUN, run=run, profile=profile, upstream=upstream)
        write_run(store, dataclasses.replace(record, started=started))
    assert recorded_pins(store, "d12") == {"a@main": "3", "b@main": "2"}
    assert recorded_pins(store, "tiny") == {}


def test_no_stage_that_is_ordered_elsewhere_has_a_section_with_names_that_move():
    assert [s.name for s in STAGES if s.compute == "gpu" and SECTIONS & {*s.config}] == []


def test_tiny_names_nothing_that_moves_and_loads_no_client_of_the_network(tmp_path):
    code = (
        "import sys; from pathlib import Path; from flows.profiles import open_profile;"
        "from flows.plan.upstream import pin; run = open_profile('tiny').run;"
        f"assert pin(run, Path({str(tmp_path)!r}), log=print) == (run, {{}});"
        "assert not {'huggingface_hub', 'httpx', 'pyarrow'} & {*sys.modules};"
        "import nanochat_core.data.hub.core_bundle; assert 'pyarrow' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_a_plan_of_d12_says_what_it_took_from_the_last_time(hub, tmp_path, monkeypatch, capsys):
    words = ["plan", "d12", "--home", str(tmp_path / "home"), "--gpus", "0"]
    words += ["--set", "task_data.core_bundle=null"]
    assert main(words) == 0
    online = capsys.readouterr()
    assert online.err == ""
    age(tmp_path / "home")
    unplug(hub, monkeypatch)
    assert main(words) == 0
    offline = capsys.readouterr()
    assert offline.err.count("as resolved 20") == 2
    assert offline.out == online.out


@pytest.mark.parametrize("revision", [None, "main"])
def test_any_dataset_of_the_hub_is_pinned(hub, tmp_path, revision):
    commit = hub.add("someone/letters", {"a.txt": b"dear"})
    shards = dataclasses.replace(
        d12().shards, source="hub", path="someone/letters/*.txt", revision=revision
    )
    run = dataclasses.replace(d12(), shards=shards)
    assert "someone/letters@main" in moving_names(run)
    home = Home(tmp_path / "home")
    assert home.pin(run).shards.revision == commit
    assert home.pins["someone/letters@main"] == commit
