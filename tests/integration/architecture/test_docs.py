"""The documents say what the code is; `make check` compares the generated pages and all links."""

import dataclasses
import re
import tomllib
from pathlib import Path

import pytest

from nanochat_core.section import Section

ROOT = Path(__file__).parents[3]
DOCS = ROOT / "docs"
DECISIONS = sorted((DOCS / "decisions").glob("*.md"))
HEADINGS = ["## Context", "## Decision", "## Status", "## Consequences"]
ROOT_PAGES = [ROOT / f"{n}.md" for n in ("README", "CONTRIBUTING", "CHANGELOG", "SECURITY")]


# What was run, where and when belongs to docs/verification.
LAB_NOTE = re.compile(
    r"\b(busy|idle) machine|\bon 20\d\d-|\bload of \d|\bseed \d+, ", re.IGNORECASE
)
MAX_WORDS = 27_000  # of guides and concepts
MAX_GUIDE = 700  # of one guide


def test_every_setting_is_in_the_reference() -> None:
    ours = [c for c in Section.__subclasses__() if c.__module__.startswith("nanochat_core")]
    settings = {f.name for c in ours for f in dataclasses.fields(c)}
    page = (DOCS / "reference" / "config.md").read_text()
    names = re.findall(r"`([\w.]+)` \||^## (\w+)", page, re.MULTILINE)
    assert settings - {part for pair in names for name in pair for part in name.split(".")} == set()


@pytest.mark.parametrize("path", DECISIONS, ids=lambda path: path.stem)
def test_a_decision_has_its_four_headings_and_a_status(path: Path) -> None:
    lines = path.read_text().splitlines()
    assert re.fullmatch(rf"# {path.stem[:4]}\. .+", lines[0])
    assert [line for line in lines if line.startswith("## ")] == HEADINGS
    assert lines[lines.index("## Status") + 2].startswith(("Accepted", "Proposed", "Superseded by"))
    assert len(lines) <= 40


def test_decisions_are_numbered_without_gaps() -> None:
    numbers = [int(path.stem[:4]) for path in DECISIONS]
    assert numbers == list(range(1, len(DECISIONS) + 1))


@pytest.mark.parametrize("path", ROOT_PAGES, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_links_lead_somewhere(path: Path) -> None:
    links = re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", path.read_text())
    assert [link for link in links if not (path.parent / link).exists()] == []


def test_every_page_is_in_the_sites_navigation() -> None:
    pages = {str(path.relative_to(DOCS)) for path in DOCS.rglob("*.md")}
    elsewhere = {"package.md", *(f"decisions/{path.name}" for path in DECISIONS)}
    found = re.findall(r'= "([\w./-]+\.md)"', (ROOT / "zensical.toml").read_text())

    assert sorted(found) == sorted(pages - elsewhere)


def test_the_version_has_a_section_in_the_changelog() -> None:
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    assert f"\n## {version} - 20" in (ROOT / "CHANGELOG.md").read_text()


def test_guides_and_concepts_are_short_and_have_no_lab_notes() -> None:
    paths = [*(DOCS / "guides").glob("*.md"), *(DOCS / "concepts").glob("*.md")]
    pages = {str(path.relative_to(DOCS)): path.read_text() for path in paths}
    words = {name: len(text.split()) for name, text in pages.items()}
    assert sum(words.values()) <= MAX_WORDS
    long = {name for name in words if name.startswith("guides/") and words[name] > MAX_GUIDE}
    assert long <= {"guides/quickstart.md", "guides/errors.md"}
    assert {name: found for name, text in pages.items() if (found := LAB_NOTE.findall(text))} == {}
