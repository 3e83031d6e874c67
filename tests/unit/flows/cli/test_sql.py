"""`nanochat sql`: every run of a store as tables, and nothing else in reach."""

import pytest

from flows.identity.manifest import Manifest
from infra.storage.base import Store
from tests.support.flows.measured import put_measured, put_measured_runs
from tests.support.flows.shelf import make_manifest, put_run


@pytest.fixture
def measured(store: Store) -> list[Manifest]:
    return put_measured_runs(store)


QUERIES = (
    "select run, status, depth, overrides, started from runs order by run",
    "select run, built, seconds, dollars, device, processes from stages "
    "where stage = 'pretrain' order by run",
    "select stage, metric, value, low, high from evals order by all",
    "select stage, step, loss, reward from steps order by stage, step",
    "select s.run, avg(e.correct::int) as share, any_value(a.files) as files "
    "from stages s join examples e using (stage, fingerprint) "
    "join artifacts a using (stage, fingerprint) group by all",
    "select run from runs where false",
)


def test_every_view_is_a_table_for_people_and_for_programs(measured, terminal):
    for query in QUERIES:
        terminal.shows("sql", query)
        terminal.shows("sql", query, "--json")
    terminal.shows("sql", "SELECT run FROM Runs ORDER BY run", "--limit", "1")
    found = terminal.read("sql", "select distinct fingerprint as f from steps order by 1")
    assert {row["f"] for row in found} == {measured[0].fingerprint, measured[2].fingerprint}


TYPES = (
    "sum(1)",  # a hugeint, a decimal in a pyarrow.Table
    *("interval 1 day", "map {'a': 1}", "'101'::bit", "'infinity'::timestamp"),
    *("'0044-03-15 (BC)'::date", "date '2026-11-30'", "'nan'::double", "null"),
)


def test_a_value_of_each_type_is_as_duckdb_has_it(store, terminal):
    columns = ", ".join(f"{value} as c{number}" for number, value in enumerate(TYPES))
    for words in ([], ["--json"]):
        terminal.shows("sql", f"select {columns}", *words)


def test_without_a_query_the_views_and_their_columns_are_listed(measured, terminal):
    terminal.shows("sql")
    terminal.shows("sql", "select column_name, column_type from (describe steps)")


def test_answers_of_base_and_of_chat_models_are_in_one_view(measured, store, terminal):
    row = {"task": "sums", "place": 0, "answer": "four", "correct": True}
    put_measured(store, "chat_eval_sft", examples=[row])
    found = terminal.read("sql", "select answer from examples order by answer")
    assert [row["answer"] for row in found] == ["1", "2", "four"]


def test_an_empty_store_has_empty_views(store, terminal):
    for view in terminal.read("sql"):
        assert terminal.read("sql", f"select count(*) as n from {view}") == [{"n": 0}]


def test_what_is_gone_or_damaged_is_passed_over_and_said(measured, store, terminal):
    gone, damaged = measured[0].logs[-1], measured[2].logs[-1]
    store.delete(gone.key)
    store.put(damaged.key, b"other bytes")
    put_run(store, "tiny-3", make_manifest("rl"))
    terminal.shows("sql", "select count(*) as n from steps")


REFUSED = """
selec 1
select nope from runs
select * from bogus
select 'a'::int
select 1; select 2
create table x as select 1
insert into runs select * from runs
drop table runs
copy runs to 'FOLDER/x.csv'
attach 'FOLDER/x.db'
set memory_limit = '9GB'
install httpfs
export database 'FOLDER/x'
call pragma_version()
select * from read_csv('/etc/passwd')
select * from read_text('/etc/passwd')
select * from read_blob('/proc/self/environ')
select * from glob('/etc/*')
select * from '/etc/passwd'
select * from read_parquet('https://example.org/x')
select getenv('HOME')
select * from tables
"""


def test_what_does_not_read_the_views_is_refused_in_one_line(measured, terminal, tmp_path):
    (folder := tmp_path / "folder").mkdir()
    for query in REFUSED.split("\n")[:-1]:
        terminal.refuses("sql", query.replace("FOLDER", str(folder)))
    assert "disabled" in terminal.fails("sql", "select * from duckdb_secrets()")[0]
    assert list(folder.iterdir()) == []
