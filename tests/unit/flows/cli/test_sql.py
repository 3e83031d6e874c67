"""`nanochat sql`: every run of a store as tables, and nothing else in reach."""

from typing import Any

import pytest

from flows.cli.app import main
from flows.identity.manifest import Manifest
from infra.storage.base import Store
from tests.support.flows.measured import put_measured
from tests.support.flows.shelf import make_manifest, put_run
from tests.support.flows.terminal import Terminal

SEGMENTS = (
    {"started": 100.0, "ended": 160.0, "device": "cpu", "processes": 1, "dollars": 0.5},
    {"started": 200.0, "ended": 230.0, "device": "cuda", "processes": 8, "dollars": 0.25},
)


@pytest.fixture
def measured(store: Store) -> list[Manifest]:
    """Two runs that share a model; the first has an evaluation."""
    model = put_measured(
        store,
        "pretrain",
        segments=SEGMENTS,
        metrics={"val_bpb": 1.25, "note": "x", "ok": True, "tasks": {"sums": 0.5}},
        steps=[
            {"step": 1, "time": 1.0, "seconds": 0.5, "loss": 3.5},
            {"step": 2, "time": 2.0, "seconds": 1.5, "loss": float("nan")},
        ],
    )
    evaluated = put_measured(
        store,
        "base_eval",
        metrics={"core": 0.2, "core_low": 0.1, "core_high": 0.3},
        inputs={"pretrain": model},
        examples=[
            {"task": "sums", "place": 0, "answer": "1", "correct": True},
            {"task": "sums", "place": 1, "answer": "2", "correct": False},
        ],
    )
    tuned = put_measured(store, "sft", steps=[{"step": 1, "time": 1.0, "reward": 0.25}])
    put_run(store, "tiny-1", model, evaluated, started="2026-11-21T06:00:00Z")
    put_run(store, "tiny-2", model, tuned, depth=4, overrides=("a.b=1",), status="failed")
    return [model, evaluated, tuned]


def rows(terminal: Terminal, query: str) -> list[dict[str, Any]]:
    return terminal.read("sql", query)


def test_runs_are_rows(measured, terminal):
    found = rows(terminal, "select run, status, depth, overrides, started from runs order by run")
    started = "2026-11-21 06:00:00"
    assert found == [
        {"run": "tiny-1", "status": "finished", "depth": None, "overrides": [], "started": started},
        {"run": "tiny-2", "status": "failed", "depth": 4, "overrides": ["a.b=1"]}
        | {"started": started},
    ]


def test_stages_say_who_built_them_and_what_that_took(measured, terminal):
    query = "select run, built, seconds, dollars, device, processes from stages "
    found = rows(terminal, query + "where stage = 'pretrain' order by run")
    effort = {"seconds": 90.0, "dollars": 0.75, "device": "cuda", "processes": 8}
    assert found == [
        {"run": "tiny-1", "built": True, **effort},
        {"run": "tiny-2", "built": False, **effort},
    ]


def test_evals_are_numbers_with_their_intervals(measured, terminal):
    found = rows(terminal, "select stage, metric, value, low, high from evals order by all")
    assert found == [
        {"stage": "base_eval", "metric": "core", "value": 0.2, "low": 0.1, "high": 0.3},
        {"stage": "pretrain", "metric": "tasks.sums", "value": 0.5, "low": None, "high": None},
        {"stage": "pretrain", "metric": "val_bpb", "value": 1.25, "low": None, "high": None},
    ]


def test_steps_have_the_columns_of_every_stage(measured, terminal):
    found = rows(terminal, "select stage, step, loss, reward from steps order by stage, step")
    assert found == [
        {"stage": "pretrain", "step": 1, "loss": 3.5, "reward": None},
        {"stage": "pretrain", "step": 2, "loss": None, "reward": None},
        {"stage": "sft", "step": 1, "loss": None, "reward": 0.25},
    ]
    fingerprints = rows(terminal, "select distinct fingerprint as f from steps order by 1")
    assert {row["f"] for row in fingerprints} == {measured[0].fingerprint, measured[2].fingerprint}


def test_examples_and_artifacts_join_with_runs(measured, terminal):
    query = (
        "select s.run, avg(e.correct::int) as share, any_value(a.files) as files "
        "from stages s join examples e using (stage, fingerprint) "
        "join artifacts a using (stage, fingerprint) group by all"
    )
    assert rows(terminal, query) == [{"run": "tiny-1", "share": 0.5, "files": 2}]


@pytest.mark.parametrize(
    ("value", "printed", "parsed"),
    [
        ("sum(1)", "1", 1),  # a hugeint, a decimal in a pyarrow.Table
        ("interval 1 day", "1 day, 0:00:00", "1 day, 0:00:00"),
        ("map {'a': 1}", '{"a": 1}', {"a": 1}),
        ("'101'::bit", "101", "101"),
        ("'infinity'::timestamp", "9999-12-31 23:59:59.999999", "9999-12-31 23:59:59.999999"),
        ("'0044-03-15 (BC)'::date", "0044-03-15 (BC)", "0044-03-15 (BC)"),
        ("date '2026-11-30'", "2026-11-30", "2026-11-30"),
        ("'nan'::double", "nan", None),
        ("null", "", None),
    ],
)
def test_a_value_of_each_type_is_as_duckdb_has_it(store, terminal, value, printed, parsed):
    assert terminal.said("sql", f"select {value} as v, 1 as one")[1].split("  ")[0] == printed
    assert terminal.read("sql", f"select {value} as v") == [{"v": parsed}]


def test_a_table_is_printed_for_people(measured, terminal):
    assert terminal.said("sql", "SELECT run, depth FROM Runs ORDER BY run") == [
        "run     depth",
        "tiny-1",
        "tiny-2  4",
    ]
    assert terminal.said("sql", "select run from runs order by 1", "--limit", "1") == [
        "run",
        "tiny-1",
        "",
        "1 more rows; --limit 0 shows all",
    ]
    assert terminal.said("sql", "select run from runs where false") == ["no rows"]


def test_without_a_query_the_views_and_their_columns_are_listed(measured, terminal):
    lines = terminal.said("sql")
    heads = [line.partition(":")[0] for line in lines if not line.startswith(" ")]
    assert heads == ["runs", "stages", "steps", "evals", "examples", "artifacts"]
    assert "loss double" in " ".join(lines)
    logged = terminal.read("sql")
    assert "reward double" in logged["steps"]["columns"]


def test_an_empty_store_has_empty_views(store, terminal):
    for view in ("runs", "stages", "steps", "evals", "examples", "artifacts"):
        assert rows(terminal, f"select count(*) as n from {view}") == [{"n": 0}]


def test_what_is_gone_or_damaged_is_passed_over_and_said(measured, store, capsys):
    gone, damaged = measured[0].logs[-1], measured[2].logs[-1]
    store.delete(gone.key)
    store.put(damaged.key, b"other bytes")
    put_run(store, "tiny-3", make_manifest("rl"))
    assert main(["sql", "select count(*) as n from steps"]) == 0
    said = capsys.readouterr()
    assert said.out.splitlines() == ["n", "0"]
    assert f"metrics.parquet of {measured[0].name} is gone" in said.err
    assert f"metrics.parquet of {measured[2].name} is damaged" in said.err
    assert "is gone" in said.err


@pytest.mark.parametrize(
    ("query", "said"),
    [
        ("selec 1", 'syntax error at or near "selec"'),
        ("select nope from runs", 'referenced column "nope" not found'),
        ("select * from bogus", "table with name bogus does not exist"),
        ("select 'a'::int", "could not convert string 'a'"),
        ("", "0 statements are given, expected one"),
        ("select 1; select 2", "2 statements are given, expected one"),
        ("create table x as select 1", "only select is allowed, not create"),
        ("insert into runs select * from runs", "only select is allowed, not insert"),
        ("drop table runs", "only select is allowed, not drop"),
        ("copy runs to 'FOLDER/x.csv'", "only select is allowed, not copy"),
        ("attach 'FOLDER/x.db'", "only select is allowed, not attach"),
        ("set memory_limit = '9GB'", "only select is allowed, not set"),
        ("install httpfs", "only select is allowed, not load"),
        ("export database 'FOLDER/x'", "only select is allowed, not export"),
        ("call pragma_version()", "only select is allowed, not call"),
        ("select * from read_csv('/etc/passwd')", "file system operations are disabled"),
        ("select * from read_text('/etc/passwd')", "file system operations are disabled"),
        ("select * from read_blob('/proc/self/environ')", "file system operations are disabled"),
        ("select * from glob('/etc/*')", "file system operations are disabled"),
        ("select * from '/etc/passwd'", "does not exist"),
        ("select * from read_parquet('https://example.org/x')", "the query cannot be answered"),
        ("select * from duckdb_secrets()", "file system operations are disabled"),
        ("select getenv('HOME')", "does not exist"),
        ("select * from tables", "does not exist"),
    ],
)
def test_what_does_not_read_the_views_is_refused_in_one_line(
    measured, terminal, tmp_path, query, said
):
    folder = tmp_path / "folder"
    folder.mkdir()
    error, hint = terminal.fails("sql", query.replace("FOLDER", str(folder)))
    assert said in error
    assert "nanochat sql" in hint
    assert "pg_" not in error  # a table of DuckDB's own
    assert list(folder.iterdir()) == []


def test_a_value_cannot_move_the_cursor_or_fill_the_screen(store, terminal):
    lines = terminal.said("sql", "select chr(27) || '[2J' as a, repeat('x', 500) as b")
    assert "\x1b" not in "".join(lines)
    assert len(lines[1]) < 100
