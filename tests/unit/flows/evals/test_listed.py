"""What `nanochat evals` lists, and where it sends people."""

import pytest

from flows.cli.artifacts.evals import usual_metric
from infra.prefect.flow_runs import page_of


@pytest.mark.parametrize(
    ("model", "metric"),
    [
        ("main", "chatcore"),
        ("sft@main", "chatcore"),
        ("rl/1a2b3c", "chatcore"),
        ("pretrain@main", "core or val_bpb"),
        ("pretrain/1a2b3c", "core or val_bpb"),
        ("pretrainer", "chatcore"),  # the name of a run: its chat model
    ],
)
def test_a_schedule_without_a_metric_is_listed_with_the_one_that_is_compared(model, metric):
    assert usual_metric(model) == metric


@pytest.mark.parametrize(
    ("root", "page"),
    [
        ("http://127.0.0.1:4200", "http://127.0.0.1:4200/v2/runs/flow-run/f-1"),
        ("https://prefect.example/base", "https://prefect.example/base/v2/runs/flow-run/f-1"),
        (
            "https://app.prefect.cloud/account/a/workspace/w",
            "https://app.prefect.cloud/account/a/workspace/w/runs/flow-run/f-1",
        ),
    ],
)
def test_a_page_is_one_of_prefect_s_new_pages(root, page):
    assert page_of(root, "f-1") == page
