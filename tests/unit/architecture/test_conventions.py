"""The files that hosts, indexes and citation tools read say what the project is."""

import re
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

from nanochat_flows.packages import PACKAGES

ROOT = Path(__file__).parents[3]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]


def read_yaml(path: Path) -> Any:
    return yaml.safe_load(path.read_text(encoding="utf-8"))


def test_every_package_that_ships_has_types() -> None:
    names = (*PACKAGES, "nanochat_flows")
    assert [name for name in names if not (ROOT / name / "py.typed").is_file()] == []
    assert "Typing :: Typed" in PROJECT["classifiers"]


def test_the_citation_is_of_this_version() -> None:
    citation = read_yaml(ROOT / "CITATION.cff")
    assert citation["cff-version"] == "1.2.0"
    for name in ("version", "license", "keywords", "authors"):
        assert citation[name] == PROJECT[name], name
    assert citation["title"] == PROJECT["name"]
    assert citation["abstract"] == PROJECT["description"]
    (author,) = PROJECT["authors"]
    assert author["name"].lower() in (ROOT / "LICENSE").read_text(encoding="utf-8").lower()


@pytest.mark.parametrize("path", ["docs/package.md", "constraints.txt"])
def test_every_extra_is_explained(path: str) -> None:
    text = (ROOT / path).read_text(encoding="utf-8")
    explained = re.findall(r"^(?:\| `|#   )([a-z0-9-]+)(?:` \||  ) *\w+", text, re.MULTILINE)
    assert explained == [*PROJECT["optional-dependencies"]]


def test_the_workflow_runs_what_continuous_integration_runs() -> None:
    (path,) = (ROOT / ".github" / "workflows").iterdir()
    workflow = read_yaml(path)
    assert workflow["permissions"] == {"contents": "read"}
    assert {"push", "pull_request"} <= set(workflow[True])  # `on` is a boolean in YAML 1.1
    (job,) = workflow["jobs"].values()
    _, setup, last = job["steps"]
    assert last == {"run": ".ci/run"}
    assert PROJECT["requires-python"] == f">={setup['with']['python-version']}"
    assert (ROOT / ".ci" / "run").stat().st_mode & 0o100
