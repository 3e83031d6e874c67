"""A sweep over depths: its models, the laws through their losses, its table, sentences and page."""

import json
import re

import pytest

from flows.profiles import open_profile
from flows.render.vega import svg
from flows.sweep.grid import open_sweep, size_of
from flows.sweep.plan import units_of
from flows.sweep.request import SweepRequest
from flows.sweep.results import report_of_sweep, write_files
from nanochat_core.errors import ConfigError
from nanochat_core.scaling import num_params
from tests.support.flows.shelf import make_manifest

BPB = {1: 3.0, 2: 2.6, 3: 2.4, 4: 2.3}


def series_of(*depths, **options):
    given = {"seeds": (42,), "stage": "base_eval", "reduction": 1, **options}
    return open_sweep(SweepRequest(vary=(f"model.depth={','.join(map(str, depths))}",), **given))


def made(depth, metrics):
    files = {"scores": f"{depth} {metrics}"}
    return make_manifest("base_eval", files=files, metrics=metrics)


def report(*depths, core=None, **options):
    """Return the report of these depths of tiny; a depth without a loss in BPB failed."""
    scores = {} if core is None else {"core": core}
    results = {
        f"d{depth} s42": made(depth, {"val_bpb": BPB[depth], **scores})
        for depth in depths
        if depth in BPB
    }
    return report_of_sweep(series_of(*depths), results, "file:///store", **options)


def test_all_depths_get_the_text_of_the_one_that_needs_most():
    series = series_of(4, 12, profile="d12")
    most = open_profile("d12").run.shards.num_shards
    assert open_profile("d12", depth=4).run.shards.num_shards < most
    assert {member.profile.run.shards.num_shards for member in series.members} == {most}
    assert units_of(series)[0].label == "shards"
    for member in series.members:  # a run's record gives the very same settings again
        again = open_profile("d12", depth=member.depth, overrides=member.request.overrides)
        assert again == member.profile
        assert member.request.overrides == (f"shards.num_shards={most}", "seed=42")
    assert series.request.overrides == ()  # opened again, the grid gives the same series


def test_the_number_of_shards_that_the_user_sets_is_kept():
    series = series_of(4, 12, profile="d12", overrides=("shards.num_shards=3",))
    assert series.members[1].request.overrides == ("shards.num_shards=3", "seed=42")
    assert series.members[1].profile.run.shards.num_shards == 3


def test_a_report_has_sizes_scores_laws_and_a_prediction(shows):
    shows(report(1, 2, 3, 4))
    run = open_profile("tiny", depth=3).run
    size = size_of(run)
    assert size.parameters == num_params(run.model, run.numerics) == 229_456
    assert size.tokens == run.pretrain.num_steps * run.pretrain.total_batch_size


def test_core_is_a_column_where_it_was_measured(shows):
    assert shows(report(1, 2, core=0.0625)).tree["points"][1]["core"] == 0.0625


def test_no_law_is_fitted_to_what_is_no_loss():
    found = report_of_sweep(series_of(1, 2, stage="chat_eval_rl"), {}, "file:///store")
    assert "series" not in found.tree


def test_the_next_depth_is_as_far_as_the_last_one_and_an_extrapolation():
    *_, after = report(1, 2, 4).tree["series"]["expected"]
    assert (after["depth"], after["measured"]) == (6, None)
    assert after["beyond"] > 1


def test_a_depth_that_failed_is_named_with_its_error_and_the_others_are_fitted(tmp_path, shows):
    error = "ValueError: <script>broken</script>\x1b[2J"
    found = report(1, 2, 5, errors={"d5 / pretrain": error})
    assert found.tree["errors"] == {"d5 / pretrain": error}
    assert list(found.tree["series"]["losses"]) == [1, 2]
    page = write_files(tmp_path, found).read_text()
    assert "d5 / pretrain: ValueError: &lt;script&gt;broken" in page
    assert "<script>" not in page
    assert "\x1b" not in page
    shows(report(1, 2, 5, errors={"d5 / pretrain": "ValueError: broken"}))


def test_several_seeds_give_their_mean_to_the_law():
    results = {
        f"d{depth} s{seed}": made(depth, {"val_bpb": bpb + seed})
        for depth, bpb in ((1, 3.0), (2, 2.0))
        for seed in (1, 2)
    }
    found = report_of_sweep(series_of(1, 2, seeds=(1, 2)), results, "file:///store")
    assert found.tree["series"]["losses"] == {1: 4.5, 2: 3.5}


def test_three_models_have_a_scatter_and_no_range(shows):
    shows(report(1, 2, 3))


def test_one_model_is_a_table_and_no_law(shows):
    found = shows(report(1, 5)).tree["series"]
    assert (found["by_flops"]["law"], found["expected"]) == (None, ())


@pytest.mark.usefixtures("drawn_anew")
def test_the_page_holds_all_that_it_shows_and_the_same_results_give_the_same_bytes(tmp_path):
    one, other = (write_files(tmp_path / name, report(*BPB)) for name in ("one", "other"))
    names = sorted(path.name for path in one.parent.iterdir())
    assert names == ["sweep.html", "sweep.json"]
    page = one.read_text()
    assert page.count("<figure>") == 2
    for label in ("d1", "d2", "d3", "d4", "d5?"):
        assert f">{label}</text>" in page
    assert "an extrapolation" in page
    for name in names:
        assert one.with_name(name).read_bytes() == other.with_name(name).read_bytes()
    law = json.loads(one.with_suffix(".json").read_text())["series"]["by_flops"]["law"]
    assert law["exponent"] > 0


def test_points_lie_in_the_picture_where_their_numbers_are():
    drawing = svg(report(*BPB).pictures[0])
    dots = re.findall(r'translate\(([\d.]+),([\d.]+)\)"[^>]*fill="var\(--ink\)', drawing)
    circles = [(float(x), float(y)) for x, y in dots][:4]
    assert [x for x, _ in circles] == sorted(x for x, _ in circles)
    assert [y for _, y in circles] == sorted(y for _, y in circles)  # down the page: less loss


def test_nothing_measured_is_a_page_without_a_picture(tmp_path):
    found = report(5, 6, errors={"tokenizer": "it failed"})
    assert not found.pictures
    assert "tokenizer: it failed" in write_files(tmp_path, found).read_text()


def test_a_directory_that_cannot_be_written_is_an_error(tmp_path):
    (tmp_path / "sweep").write_text("a file")
    with pytest.raises(ConfigError, match="cannot be written"):
        write_files(tmp_path, report(1, 2))
    assert (tmp_path / "sweep").read_text() == "a file"
