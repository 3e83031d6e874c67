"""The report card of a synthetic run: what it says, that it is safe to open, that it repeats."""

import html
import json
import re
from itertools import chain
from pathlib import Path

import pytest

from flows.profiles import open_profile
from flows.render.charts import Chart, smooth, thin
from flows.render.text import MAX_SHOWN, count, listed, money, percent, size, visible
from flows.render.vega import IN_PAGE, svg
from flows.report import stage
from flows.report.card import make_card
from flows.report.inputs import Stop, open_artifacts
from flows.stages import Quantity
from nanochat_core.errors import ArtifactError
from tests.support.flows.reported import Card, make_inputs, make_report, plain, run_report

STOP = Stop(after=4, back_to=3)
HOSTILE = (
    '<script>alert(1)</script></p><img src="http://evil.example/x" onerror=alert(2)>'
    " \u202egnp.exe \x1b[31m ``` | {{ card }} \u2028</style>"
)


@pytest.fixture(scope="module")
def hostile(tmp_path_factory: pytest.TempPathFactory) -> Card:
    """The card of models whose every answer is hostile."""
    return make_report(tmp_path_factory.mktemp("hostile"), answer=HOSTILE)


def test_the_page_names_val_bpb_and_the_chat_scores_of_every_stage(card: Card) -> None:
    page, text = card
    tiles = plain(page.partition("</dl>")[0])
    assert "Validation bits per byte 1.6000 val_bpb, 50.0 % below 3.2000 at step 0" in tiles
    assert "ChatCORE after midtraining 0.100 0.050 to 0.200 ChatCORE after SFT 0.210" in tiles
    assert "ChatCORE after RL 0.610 +0.400 (" in tiles
    assert "SFT (supervised fine-tuning)" in text
    assert "| 61.0 % (56.0 to 66.0 %, 122 of 200); +40.0 points (+32.8 to +46.4) |" in text
    assert "\n- bits per byte: 3.200 -> 1.600 (-50.0 %)\n" in text
    assert "\n- ChatCORE: 0.100 after midtraining, 0.210 after SFT, 0.610 after RL\n" in text
    assert "\n| task | midtraining | SFT | RL |\n" in text


def test_the_page_names_the_experiment_and_marks_what_rl_made_worse(
    card: Card, tmp_path: Path
) -> None:
    page, text = card
    assert "<h1>mine</h1>" in page
    assert text.startswith("# Report card: mine\n")
    for document in card:
        assert "1970-01-01, 8 x NVIDIA H100 80GB HBM3." in document
    assert page.count('<td class="worse">') == 1  # spelling, 90 % and 70 %; sums are better
    loss = "worse: spelling 90.0 % -> 70.0 % after RL"
    assert f'<p class="worse">{html.escape(loss)}</p>' in page
    assert f"\n- {loss}\n" in text
    run = open_profile("tiny", overrides=["seed=7", "rl.num_steps=3"]).run
    page, _ = make_report(tmp_path, run=run)
    assert "nanochat run tiny --set seed=7 --set rl.num_steps=3</code>" in page


def test_every_row_of_the_card_is_on_the_page_and_in_the_markdown(
    ordinary: dict[str, Path], card: Card
) -> None:
    page, text = plain(re.sub("</?code>", "", card[0])), card[1].replace("`", "")
    shown = make_card(open_artifacts(ordinary))
    assert shown.lead in page
    for section in shown.sections:
        cells = [cell for row in section.rows for cell in row]
        texts = [section.title, *section.head, *section.items, *chain(*section.facts)]
        texts += chain(section.notes, *((cell.text, *cell.notes) for cell in cells))
        for sample in section.samples:
            texts += [sample.note, sample.prompt, *chain(*sample.answers)]
        for row in texts:
            assert " ".join(row.replace("`", "").split()) in page
            assert row.replace("`", "") in text or section.charts
    assert "tokens per parameter 2.56" in page


def swap_evaluations(inputs: dict[str, Path], one: str, other: str) -> None:
    for file in sorted(inputs[one].iterdir()):
        there = inputs[other] / file.name
        mine, its = file.read_bytes(), there.read_bytes()
        file.write_bytes(its)
        there.write_bytes(mine)


def test_what_a_stage_before_rl_made_worse_is_named_though_rl_repaired_it(tmp_path: Path) -> None:
    inputs = make_inputs(tmp_path / "store")
    swap_evaluations(inputs, "chat_eval_midtrain", "chat_eval_sft")
    _, text = run_report(tmp_path / "job", inputs)
    losses = "spelling 90.0 % -> 70.0 % after RL, arithmetic 21.0 % -> 10.0 % after SFT"
    assert f"\n- worse: {losses}\n" in text


def test_a_run_without_a_loss_says_so(tmp_path: Path) -> None:
    inputs = make_inputs(tmp_path / "store")
    # Every model is the same: none is worse than the one before.
    for name in ("chat_eval_midtrain", "chat_eval_rl"):
        for file in inputs["chat_eval_sft"].iterdir():
            (inputs[name] / file.name).write_bytes(file.read_bytes())
    _, text = run_report(tmp_path / "job", inputs)
    assert "\n- nothing worse: no task scores clearly lower than one stage before\n" in text
    assert "+0.0 points" not in text.partition("## Scores")[0]


@pytest.mark.usefixtures("drawn_anew")
def test_the_same_artifacts_give_the_same_bytes(
    ordinary: dict[str, Path], card: Card, tmp_path: Path
) -> None:
    assert run_report(tmp_path, ordinary) == card


def test_the_page_needs_nothing_but_itself(card: Card) -> None:
    page, _ = card
    assert len(page) < stage.MAX_BYTES
    assert not re.search(r"\b(src|href|srcset|action|data)\s*=", strip_text(page))
    assert not re.search(r"<(script|iframe|object|embed|form|link|base)\b|@import|url\(", page)
    assert "default-src 'none'" in page


def test_hostile_text_stays_text(hostile: Card) -> None:
    page, text = hostile
    assert "&lt;script&gt;alert(1)&lt;/script&gt;" in page
    assert "<img" not in page
    assert "{{ card }}" in page
    for document in (page, text):
        assert not {"\u202e", "\x1b", "\u2028"} & set(document)
    assert "\n````text\n" in text


def test_answers_that_rl_paid_for_stand_with_their_rewards(hostile: Card) -> None:
    page, text = hostile
    for step, paid in ((1, "0"), (5, "1"), (9, "0.5")):  # the first, the middle and the last one
        assert f"step {step}: 2 apples and 3 at step {step}?\n[reward 0] " in text
        assert f"[reward {paid}] paid {step}" in text
        assert f"reward {paid} paid {step}" in plain(page)
    assert "at step 3?" not in page + text
    assert "<img" not in page


def test_an_rl_that_left_no_samples_has_no_section(tmp_path: Path) -> None:
    inputs = make_inputs(tmp_path / "store")
    (inputs["rl"] / "samples.jsonl").write_text("\n")
    page, text = run_report(tmp_path, inputs)
    assert "Rewarded samples of RL" not in page + text


def test_every_stage_stands_in_the_lineage_with_its_digest(
    ordinary: dict[str, Path], card: Card
) -> None:
    for name, files in ordinary.items():
        manifest = json.loads((files.parent / "manifest.json").read_text())
        fingerprint, digest = manifest["fingerprint"][:12], manifest["digest"][:12]
        assert f"| {name} | `{fingerprint}` | `{digest}` |" in card[1]


def test_bytes_per_token_stand_beside_those_of_known_vocabularies(card: Card) -> None:
    page, text = card
    assert "| held-out | 4.31 | not at hand | 4.62 |" in text
    assert "| russian | 1.90 | 1.69 | 3.83 |" in text
    widths = re.findall(r"left:0.00%;width:([\d.]+)%", page.partition("<h2>Vocabulary")[2])
    assert widths == ["93.29", "100.00", "41.13", "36.58", "82.90"]


def test_a_small_vocabulary_is_not_compared(tmp_path: Path) -> None:
    inputs = make_inputs(tmp_path / "store", vocab_size=320)
    assert "Vocabulary" not in "".join(run_report(tmp_path, inputs))


def test_a_tokenizer_without_statistics_has_no_table(tmp_path: Path) -> None:
    inputs = make_inputs(tmp_path / "store")
    (inputs["tokenizer"].parent / "logs" / "events.jsonl").unlink()
    page, text = run_report(tmp_path, inputs)
    assert "Vocabulary" not in page + text


def test_resumes_are_marked_on_their_curves(card: Card) -> None:
    page, text = card
    said = "12 (stopped after 40), 20 (stopped after 40)"
    figure = page.partition("<figure>")[2].partition("</figure>")[0]
    assert f"resumed from step {said}" in plain(figure)
    row = f"| pretrain | 8 x NVIDIA H100 80GB HBM3 | 40 | 50,000 | 41.0 % | {said} |"
    assert row in text
    assert "| midtrain | cpu | 40 | 50,000 | not known | never |" in text


def test_time_and_money_count_every_stage_and_attempt(card: Card) -> None:
    for document in card:
        assert "14 min 12 s of work over all stages, $3.25" in document


def test_places_and_hosts_are_left_out(
    card: Card, tmp_path_factory: pytest.TempPathFactory
) -> None:
    for document in card:
        assert str(tmp_path_factory.getbasetemp()) not in document
        assert "secret-host" not in document


@pytest.mark.parametrize("lost", ["manifest.json", "files", "files/scores.json"])
def test_a_missing_part_of_an_artifact_is_an_error(tmp_path: Path, lost: str) -> None:
    inputs = make_inputs(tmp_path / "store")
    path = inputs["chat_eval_rl"].parent / lost
    path.rename(tmp_path / "gone")
    with pytest.raises(ArtifactError, match="chat_eval_rl"):
        run_report(tmp_path, inputs)


def test_a_missing_artifact_is_an_error(tmp_path: Path) -> None:
    inputs = make_inputs(tmp_path / "store")
    del inputs["rl"]
    with pytest.raises(ArtifactError, match="needs the artifacts of rl"):
        run_report(tmp_path, inputs)


def test_an_artifact_of_another_stage_is_an_error(tmp_path: Path) -> None:
    inputs = make_inputs(tmp_path / "store")
    inputs["sft"] = inputs["rl"]
    with pytest.raises(ArtifactError, match="expected sft"):
        run_report(tmp_path, inputs)


def test_thinning_keeps_the_mean_and_the_last_step() -> None:
    points = [(step, float(step % 7)) for step in range(1, 701)]
    thinned = thin(points, max_points=100)
    assert len(thinned) == 100
    assert thinned[-1] == (700, 3.0)
    assert thin(points[:50]) == points[:50]


def test_smoothing_does_not_lag_behind_a_fall() -> None:
    points = [(step, 100.0 - step) for step in range(100)]
    assert smooth(points)[50] == (50, 50.0)


def test_a_chart_takes_its_colours_from_the_page() -> None:
    quantity = Quantity("eval", "reward", "a & b", '"c"')
    drawing = svg(Chart(quantity=quantity, curves=[[(0, 2.0), (5, 1.0)]], stops=[STOP]))
    assert drawing.count('stroke="var(--mark)"') == 2
    assert 'aria-label="a &amp; b: &quot;c&quot;"' in drawing
    assert not re.search(r'(fill|stroke)="(#|rgb|white|black)', drawing)
    assert "id=" not in drawing


def test_a_few_points_are_dots_and_a_loss_begins_after_its_first_steps() -> None:
    evaluated, loss = (Quantity(kind, "loss", "loss", "nats") for kind in ("eval", "step"))
    for points, lines in ((3, 0), (4, 1)):
        curve = [(step, 1.0 / (step + 1)) for step in range(points)]
        layers = Chart(quantity=evaluated, curves=[curve]).panel(IN_PAGE).layers
        assert [layer["mark"]["type"] for layer in layers] == ["line"] * lines + ["circle"]
    curve = [(step, 9.0 - step) for step in range(1, 41)]
    for layer in Chart(quantity=loss, curves=[curve]).panel(IN_PAGE).layers:
        assert layer["data"]["values"][0]["step"] == 3


def test_numbers_read_like_numbers() -> None:
    assert [count(n) for n in (7, 1_500, 4_812_345, 999_900_000, 3e14)] == [
        "7",
        "1.5 k",
        "4.81 M",
        "1 B",
        "300 T",
    ]
    assert [size(n) for n in (12, 1_482_000, 10**10)] == ["12 bytes", "1.5 MB", "10.0 GB"]
    assert percent(0.1234) == "12.3 %"
    assert [money(d) for d in (1234.5, 0.25, 0.0)] == ["$1,234.50", "$0.25", "no price"]
    assert listed([1, 2, 3, 4]) == "1, 2, 3, 4"
    assert listed(range(1, 21)) == "1, 2, 3, 4 and 16 more"
    assert listed([]) == ""


def test_invisible_characters_are_shown_and_long_text_is_cut() -> None:
    assert visible("a\n\tb\x00\u202e") == "a\n\tb\\x00\\u202e"
    assert len(visible("x" * 10 * MAX_SHOWN)) == MAX_SHOWN + 1


def strip_text(page: str) -> str:
    """The page's tags without what stands between them."""
    return " ".join(re.findall(r"<[^>]*>", page))
