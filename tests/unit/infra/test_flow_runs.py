"""The addresses of runs in Prefect's pages."""

import pytest

from infra.prefect.flow_runs import page_of


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
