"""The walk with a mouse: the form, the run, its failure, Retry and what it made, in Chromium.

    python -m tests.campaigns.end_to_end.browser --images docs/images

It takes the pictures of docs/guides/walk-through.md, and fails when a page shows something else
than that page says.
"""

import argparse
import re
import shutil
import subprocess
import tempfile
from pathlib import Path

from playwright.sync_api import Locator, Page, ViewportSize, expect, sync_playwright

from infra.prefect.server import find_password
from tests.campaigns.end_to_end.small import DEPTH, PLACE, SECONDS, SETTINGS, newest_step, stages_of
from tests.campaigns.end_to_end.test_walk import BEFORE_FAILURE, FAILING, NAME
from tests.support.browser.chromium import launch
from tests.support.deployments.prefect_api import wait_until
from tests.support.infra.stack.live import LiveStack

WINDOW: ViewportSize = {"width": 1280, "height": 900}
PHONE: ViewportSize = {"width": 390, "height": 844}
MAX_BYTES = 150_000  # of a picture
PATIENCE = 60_000.0  # milliseconds; a page loads in two seconds on an idle machine


class Visitor:
    """A person at the pages of one server."""

    def __init__(self, page: Page, stack: LiveStack, images: Path) -> None:
        self.page = page
        self.stack = stack
        self.images = images
        page.set_default_timeout(PATIENCE)
        expect.set_options(timeout=PATIENCE)

    def log_in(self) -> None:
        """Type the password that `nanochat up` prints to a terminal."""
        password = find_password(self.stack.home)
        assert password is not None
        self.page.goto(self.stack.api.url.removesuffix("/api"))
        self.page.get_by_placeholder("admin:pass").fill(password)
        self.page.get_by_role("button", name="Login").click()
        expect(self.page.get_by_text("Dashboard").first).to_be_visible()

    def go(self, path: str) -> None:
        """Open a page of the server."""
        self.page.goto(f"{self.stack.api.url.removesuffix('/api')}/v2/{path}")

    def picture(self, name: str) -> None:
        """What the window shows, as docs/images/prefect-NAME.png in few colours."""
        path = self.images / f"prefect-{name}.png"
        self.page.wait_for_timeout(8000)  # the graph glides to its place, messages fade
        self.page.screenshot(path=path)
        if convert := shutil.which("convert"):  # ImageMagick's; without it pictures are larger
            done = subprocess.run(
                [convert, path, "-strip", "-dither", "None", "-colors", "64", f"PNG8:{path}"],
                check=False,  # a stand-in by that name refuses
            )
            assert done.returncode or path.stat().st_size < MAX_BYTES, path.stat().st_size

    def fill_form(self) -> None:
        """What a person types into the form of nanochat/nanochat."""
        page = self.page
        page.get_by_label("Depth").fill(str(DEPTH))
        page.get_by_label("Name of the run").fill(NAME)
        settings = {**SETTINGS, "pretrain.num_steps": 600}
        self._add_items("Changed settings", [f"{n}={value}" for n, value in settings.items()])
        self._add_items("Placement settings", list(PLACE))
        page.get_by_label("Retries per stage").fill("1")

    def _add_items(self, label: str, items: list[str]) -> None:
        """Add texts to a list of the form."""
        part = self._part(label)
        for number, text in enumerate(items):
            part.get_by_role("button", name="Add item").click()
            part.locator("textarea").nth(number).fill(text)

    def _part(self, label: str) -> Locator:
        """A field with its label and all that belongs to it: the nearest box around the label."""
        words = self.page.get_by_text(re.compile(rf"^{re.escape(label)} \(Optional\)$"))
        return words.locator("xpath=ancestor::*[.//fieldset][1]")

    def choose(self, what: str) -> None:
        """Choose from the menu of a run's page, and confirm."""
        page = self.page
        page.locator("main button[aria-haspopup='menu']").first.click()
        page.get_by_role("menuitem", name=what).click()
        page.get_by_role("dialog").or_(page.get_by_role("alertdialog")).get_by_role(
            "button", name=re.compile(what)
        ).click()

    def tab(self, name: str) -> None:
        """Turn to a part of a run's page."""
        self.page.get_by_role("tab", name=name).click()


def visit(visitor: Visitor) -> None:
    """All of it."""
    stack = visitor.stack
    stack.start()
    visitor.log_in()
    run = fill_form(visitor)
    watch_failure(visitor, run)
    retry(visitor, run)
    look_at_artifacts(visitor, run)
    stack.down()


def fill_form(visitor: Visitor) -> str:
    """Submit a run; return its id."""
    stack, page = visitor.stack, visitor.page
    deployment = stack.api.deployment("nanochat/nanochat")
    visitor.go(f"deployments/deployment/{deployment['id']}/run")
    visitor.fill_form()
    page.get_by_label("Profile").scroll_into_view_if_needed()
    visitor.picture("form")
    page.set_viewport_size(PHONE)
    page.get_by_label("Profile").scroll_into_view_if_needed()
    visitor.picture("form-phone")
    page.set_viewport_size(WINDOW)
    page.get_by_role("button", name="Submit").click()
    (run,) = wait_until(lambda: stack.api.runs_of(deployment), seconds=60, what="the run")
    return run["id"]


def watch_failure(visitor: Visitor, run: str) -> None:
    """A stage cannot be put into the store: a file is where its directory should be."""
    stack, page = visitor.stack, visitor.page
    visitor.go(f"runs/flow-run/{run}")
    wait_until(lambda: newest_step(stack, "pretrain"), seconds=900, what="pretraining")
    (stack.home / "store" / FAILING).touch()
    page.reload()  # its graph is drawn for the width of a run that has just begun
    expect(page.get_by_text("Running").first).to_be_visible()
    visitor.picture("run")
    visitor.go("dashboard")  # the graph moves all the time, which costs half a core
    ended = stack.api.wait_for_end(run, seconds=SECONDS)
    assert ended["state_type"] == "FAILED", ended["state"]
    visitor.go(f"runs/flow-run/{run}")
    expect(page.get_by_text("Failed").first).to_be_visible()
    page.get_by_label("log sort order").click()
    page.get_by_role("option", name="Newest to oldest").click()
    expect(page.get_by_text(re.compile("not a directory|refuses", re.I)).first).to_be_visible()
    visitor.picture("failed")


def retry(visitor: Visitor, run: str) -> None:
    """Once the store is well again."""
    stack, page = visitor.stack, visitor.page
    (stack.home / "store" / FAILING).unlink()
    visitor.choose("Retry")
    wait_until(lambda: stack.api.run(run)["run_count"] == 2, seconds=180, what="the retry")
    ended = stack.api.wait_for_end(run, seconds=SECONDS)
    assert ended["state_type"] == "COMPLETED", ended["state"]
    states = stages_of(stack, run)
    assert {states[stage] for stage in BEFORE_FAILURE} == {"Cached"}, states
    page.reload()
    expect(page.get_by_text("Completed").first).to_be_visible()
    visitor.tab("Task Runs")
    expect(page.get_by_text("Cached").first).to_be_visible()
    visitor.picture("retried")


def look_at_artifacts(visitor: Visitor, run: str) -> None:
    """Those of the run, and the report card's page."""
    page = visitor.page
    visitor.tab("Artifacts")
    expect(page.get_by_text("report-card").first).to_be_visible()
    visitor.picture("artifacts")
    found = visitor.stack.api.artifacts(run)
    card = next(each for each in found if each["key"].endswith("report-card"))
    visitor.go(f"artifacts/artifact/{card['id']}")
    expect(page.get_by_text("val_bpb").first).to_be_visible()
    visitor.picture("report")


def main() -> None:
    """The walk once, and its pictures."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.campaigns.end_to_end.browser", description=__doc__
    )
    parser.add_argument("--images", type=Path, required=True, help="where the pictures go")
    images = parser.parse_args().images
    images.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as directory, sync_playwright() as playwright:
        page = launch(playwright).new_page(viewport=WINDOW)
        stack = LiveStack(Path(directory) / "home", port=4750)
        try:
            visit(Visitor(page, stack, images))
        except BaseException:
            page.screenshot(path=Path(tempfile.gettempdir()) / "walk-failed.png")
            raise
        finally:
            stack.end()


if __name__ == "__main__":
    main()
