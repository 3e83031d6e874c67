"""The report card of a synthetic run: its texts, that it is safe to open, that it repeats.

The texts of the ordinary card are a transcript; so is, for other runs, what differs from them.
"""

import difflib
import html
import json
import re

import pytest

from flows.render.charts import Chart, smooth, thin
from flows.render.vega import svg
from flows.report.inputs import Stop
from flows.stages import Quantity
from tests.support.flows.reported import make_inputs, make_report, run_report

HOSTILE = (
    '<script>alert(1)</script></p><img src="http://evil.example/x" onerror=alert(2)>'
    " \u202egnp.exe \x1b[31m ``` | {{ card }} \u2028</style>"
)


@pytest.fixture(scope="module")
def hostile(tmp_path_factory):
    """The card of models whose every answer is hostile."""
    return make_report(tmp_path_factory.mktemp("hostile"), answer=HOSTILE)


@pytest.fixture
def inputs(tmp_path):
    """The files of an ordinary run, which a test may change."""
    return make_inputs(tmp_path / "store")


@pytest.fixture
def changes(card, inputs, tmp_path, transcript):
    """Compare what differs between a card and the ordinary one with the transcript."""

    def compare(made=None):
        made = made or run_report(tmp_path / "job", inputs)
        for name, old, new in zip(("report.html", "report.md"), card, made, strict=True):
            lines = difflib.unified_diff(lines_of(old), lines_of(new), lineterm="", n=0)
            kept = [line for line in lines if not line.startswith(("---", "+++", "@@"))]
            transcript.check(f"diff {name}", "\n".join(kept))
        return made

    return compare


def lines_of(document):
    """Return the lines of a text that are not empty; of a page those between its tags."""
    if document.startswith("<!"):
        document = re.sub(r"<(style|svg)\b.*?</\1>", "", document, flags=re.DOTALL)
        document = html.unescape(re.sub("(?:<[^>]*>)+", "\n", document))
    document = re.sub(r"Python 3\.\d+\.\d+", "Python 3.N.N", document)
    return [line.strip() for line in document.splitlines() if line.strip()]


def edit_scores(inputs, name, **changed):
    path = inputs[name] / "scores.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changed))


def test_the_card_of_an_ordinary_run(card, transcript):
    for name, document in zip(("report.html", "report.md"), card, strict=True):
        transcript.check(name, "\n".join(lines_of(document)))
    page, text = card
    assert page.count('<td class="worse"') == 1  # spelling, 90 % and 70 %; sums are better
    assert '<p class="worse">worse: spelling' in page
    assert text.count("| $0.25 |") == 13


def test_what_a_stage_before_rl_made_worse_is_named_though_rl_repaired_it(inputs, changes):
    for file in sorted(inputs["chat_eval_midtrain"].iterdir()):
        there = inputs["chat_eval_sft"] / file.name
        mine, its = file.read_bytes(), there.read_bytes()
        file.write_bytes(its)
        there.write_bytes(mine)
    changes()


def test_a_run_without_a_loss_has_none(inputs, changes):
    # Every model is the same: none is worse than the one before.
    for name in ("chat_eval_midtrain", "chat_eval_rl"):
        for file in inputs["chat_eval_sft"].iterdir():
            (inputs[name] / file.name).write_bytes(file.read_bytes())
    _, text = changes()
    assert "+0.0 points" not in text.partition("## Scores")[0]


def test_the_page_needs_nothing_but_itself(card):
    page, _ = card
    tags = " ".join(re.findall(r"<[^>]*>", page))
    assert not re.search(r"\b(src|href|srcset|action|data)\s*=", tags)
    assert not re.search(r"<(script|iframe|object|embed|form|link|base)\b|@import|url\(", page)
    assert "default-src 'none'" in page


def test_hostile_text_stays_text(hostile):
    page, text = hostile
    assert "&lt;script&gt;alert(1)&lt;/script&gt;" in page
    assert "<img" not in page
    assert "{{ card }}" in page
    for document in (page, text):
        assert not {"\u202e", "\x1b", "\u2028"} & set(document)
    assert "\n````text\n" in text


def test_answers_show_calls_of_the_calculator_as_the_chat_does(tmp_path):
    answer = "7+5 = <<7+5=12>>12, but <<1/0>>.\n#### 2 ways<<12-2=10>>#### 10\n#### 10"
    calls = "7+5 = [calculator: 7+5 = 12] 12, but [calculator: 1/0]."
    shown = f"{calls}\n#### 2 ways [calculator: 12-2 = 10]\n10\n10"
    page, text = make_report(tmp_path, answer=answer)
    assert html.unescape(page).count(shown) == text.count(shown) == 6  # of chat models and RL
    assert text.count(answer) == 1  # a base model calls nothing


def test_an_rl_that_left_no_samples_has_no_section(inputs, changes):
    (inputs["rl"] / "samples.jsonl").write_text("\n")
    changes()


def test_bars_are_as_long_as_their_numbers_and_stay_in_their_places(card):
    page, _ = card
    widths = re.findall(r"left:0.00%;width:([\d.]+)%", page.partition("<h2>Vocabulary")[2])
    assert widths == ["93.29", "100.00", "41.13", "36.58", "82.90"]
    assert 'u style="left:25.65%"' in page  # GPT-2's score
    # Also of a score below guessing.
    places = [float(share) for share in re.findall(r"left:([-\d.]+)%", page)]
    assert (min(places), max(places) <= 100.0) == (0.0, True)


def test_a_small_vocabulary_is_not_compared(tmp_path):
    assert "Vocabulary" not in "".join(make_report(tmp_path, vocab_size=320))


def test_a_tokenizer_without_statistics_has_no_table(inputs, changes):
    (inputs["tokenizer"].parent / "logs" / "events.jsonl").unlink()
    changes()


def test_places_and_hosts_are_left_out(card, tmp_path_factory):
    for document in card:
        assert str(tmp_path_factory.getbasetemp()) not in document
        assert "secret-host" not in document


def test_a_chat_task_that_could_not_be_evaluated_is_reported(inputs, changes):
    failed = {"humaneval": "no <sandbox> here"}
    edit_scores(inputs, "chat_eval_rl", chatcore=None, failed=failed, intervals={})
    changes()


def test_a_base_model_that_was_not_asked_has_no_core(inputs, changes):
    edit_scores(inputs, "base_eval", core=None, tasks={})
    changes()


def test_a_task_of_core_that_could_not_be_evaluated_is_reported(inputs, changes):
    failed = {"boolq": "boolq.jsonl line 3 is no example"}
    edit_scores(inputs, "base_eval", core=None, failed=failed)
    changes()


def test_the_card_says_which_tasks_are_english_and_what_training_asks_too(inputs, tmp_path):
    for name in ("midtrain", "sft", "rl"):
        scores = json.loads((inputs[f"chat_eval_{name}"] / "scores.json").read_text())
        tasks = scores["tasks"] | {"letters": scores["tasks"]["spelling"]}
        edit_scores(inputs, f"chat_eval_{name}", tasks=tasks)
    path = inputs["task_data"] / "task_data.json"
    path.write_text(path.read_text().replace('100, "overlap": 0', '100, "overlap": 7'))
    assert (
        "In English: arithmetic, spelling. From a file of the user's own, in its language: "
        "letters. Questions that training has too: 7 of 100 of letters, 7 of 100 of spelling."
    ) in run_report(tmp_path / "job", inputs)[1]


def test_thinning_keeps_the_mean_and_the_last_step():
    points = [(step, float(step % 7)) for step in range(1, 701)]
    thinned = thin(points, max_points=100)
    assert len(thinned) == 100
    assert thinned[-1] == (700, 3.0)
    assert thin(points[:50]) == points[:50]


def test_smoothing_does_not_lag_behind_a_fall():
    points = [(step, 100.0 - step) for step in range(100)]
    assert smooth(points)[50] == (50, 50.0)


def test_a_chart_takes_its_colours_from_the_page():
    quantity = Quantity("eval", "reward", "a & b", '"c"')
    stops = [Stop(after=4, back_to=3)]
    drawing = svg(Chart(quantity=quantity, curves=[[(0, 2.0), (5, 1.0)]], stops=stops).panel)
    assert drawing.count('stroke="var(--mark)"') == 2
    assert 'aria-label="a &amp; b: &quot;c&quot;"' in drawing
    assert not re.search(r'(fill|stroke)="(#|rgb|white|black)', drawing)
    assert "id=" not in drawing


def test_a_few_points_are_dots_and_a_loss_begins_after_its_first_steps():
    evaluated, loss = (Quantity(kind, "loss", "loss", "nats") for kind in ("eval", "step"))
    for points, lines in ((3, 0), (4, 1)):
        curve = [(step, 1.0 / (step + 1)) for step in range(points)]
        layers = Chart(quantity=evaluated, curves=[curve]).panel.layers
        assert [layer["mark"]["type"] for layer in layers] == ["line"] * lines + ["circle"]
    curve = [(step, 9.0 - step) for step in range(1, 41)]
    for layer in Chart(quantity=loss, curves=[curve]).panel.layers:
        assert layer["data"]["values"][0]["step"] == 3
