"""`nanochat miniseries` on this machine."""


def test_the_plan_counts_what_is_shared_once_and_the_rest_for_each_depth(terminal):
    lines = terminal.said("miniseries", "tiny", "--depths", "1,2,3", "--plan", "--gpus", "0")

    assert [line.split()[1] for line in lines[:5]] == [
        *("shards", "task_data", "tokenizer", "tokens", "rows")
    ]
    assert [line.split()[0] for line in lines if line.startswith("d")] == [
        "depth",
        "d1",
        "d2",
        "d3",
    ]
    assert lines[-1].startswith("11 to build; 2 of 11 stages have no estimate; the rest take ")
