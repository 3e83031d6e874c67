"""`nanochat sweep` and `nanochat miniseries`: their plans."""


def test_a_miniseries_is_a_sweep_over_the_depth(terminal):
    sweep = ("--vary", "model.depth=1,2", "--stage", "base_eval", "--reduction", "1")
    one = terminal.read("miniseries", "tiny", "--depths", "1, 2", "--plan", "--gpus", "0")
    other = terminal.read("sweep", "tiny", *sweep, "--seeds", "42", "--plan", "--gpus", "0")
    assert one == other


def test_a_plan_counts_what_is_shared_once_and_the_rest_for_each_depth(terminal):
    place = "--gpus 0 --place threads=2"
    terminal.shows(f"miniseries tiny --depths 1,2,3 --plan {place}")
