"""The system's Chromium, without a window."""

import os
import shutil

from playwright.sync_api import Browser, Playwright

NO_CHROMIUM = "no Chromium on this machine (Debian: apt-get install chromium)"


def find_chromium() -> str | None:
    """Return the path of the program, or None."""
    return shutil.which("chromium") or shutil.which("chromium-browser")


def launch(playwright: Playwright) -> Browser:
    """Start it; root has no sandbox of Chromium's."""
    arguments = ["--disable-gpu", "--disable-background-networking"]
    # The suggestions of the address bar are pages of their own, loaded in every window: a quarter
    # of a test's CPU seconds.
    arguments += ["--disable-features=WebUIOmniboxPopup,WebUIOmniboxAimPopup"]
    arguments += ["--no-sandbox"] if os.geteuid() == 0 else []
    return playwright.chromium.launch(executable_path=find_chromium(), args=arguments)
