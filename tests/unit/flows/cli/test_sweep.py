"""`nanochat sweep` and `nanochat miniseries`: their plans."""

VARY = ("--vary", "optimizer.muon_lr=0.01,0.03")


def test_the_plan_has_every_run_and_shared_stages_once_a_seed(terminal):
    tree = terminal.read("sweep", "tiny", *VARY, "--seeds", "1,2", "--plan", "--gpus", "0")
    stages = [(stage["stage"], stage["members"]) for stage in tree["stages"]]
    assert ("rows", ["base s1", "p1 s1", "p2 s1"]) in stages
    assert [members for stage, members in stages if stage == "pretrain"] == [
        [f"{point} s{seed}"] for seed in (1, 2) for point in ("base", "p1", "p2")
    ]


def test_a_miniseries_is_a_sweep_over_the_depth(terminal):
    sweep = ("--vary", "model.depth=1,2", "--stage", "base_eval", "--reduction", "1")
    one = terminal.read("miniseries", "tiny", "--depths", "1, 2", "--plan", "--gpus", "0")
    other = terminal.read("sweep", "tiny", *sweep, "--seeds", "42", "--plan", "--gpus", "0")
    assert one == other
    stages = [(stage["stage"], stage["depths"]) for stage in one["stages"]]
    assert stages[4:7] == [("rows", [1, 2]), ("pretrain", [1]), ("pretrain", [2])]
    assert one["seconds"] > 0


def test_a_plan_counts_what_is_shared_once_and_the_rest_for_each_depth(terminal):
    place = "--gpus 0 --place threads=2"
    terminal.shows(f"miniseries tiny --depths 1,2,3 --plan {place}")
