"""How the page looks, as far as that can be computed: width, colours, contrast, names, motion."""

import itertools
from collections.abc import Callable
from typing import Any

from playwright.sync_api import Page, expect

from tests.support.browser.chat import ask, begin, send
from tests.support.browser.fixtures import PHONE
from tests.support.browser.scripted_server import ScriptedServer, answer, event, refusal

WIDE = (
    "\n\n| " + " | ".join(f"column number {i}" for i in range(12)) + " |\n" + "|-" * 12 + "|\n\n"
    "```\n" + "x" * 300 + "\n```\n\n" + "w" * 300 + "\n\n`" + "c" * 300 + "`\n\n"
    "https://example.com/" + "p" * 300 + "\n\n1. " + "l" * 300 + "\n\n# " + "h" * 100
)
Opens = Callable[..., Page]
# Every piece of text that is seen: its colour and the one behind it, its size and weight.
COLOURS = """() => {
  const canvas = document.createElement("canvas").getContext("2d", {willReadFrequently: true});
  const painted = (...colours) => {
    for (const colour of ["white", ...colours]) {
      canvas.fillStyle = colour;
      canvas.fillRect(0, 0, 1, 1);
    }
    return [...canvas.getImageData(0, 0, 1, 1).data].slice(0, 3);
  };
  const found = [], walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  for (let node = walker.nextNode(); node; node = walker.nextNode()) {
    const element = node.parentElement, style = getComputedStyle(element);
    if (!node.data.trim() || !element.checkVisibility({visibilityProperty: true})) continue;
    if (element.closest(".unseen, script, style, noscript, button:disabled, .skip")) continue;
    const behind = [];
    for (let e = element; e; e = e.parentElement)
      behind.unshift(getComputedStyle(e).backgroundColor);
    found.push({text: node.data.trim().slice(0, 40), ink: painted(...behind, style.color),
                paper: painted(...behind), size: parseFloat(style.fontSize),
                weight: Number(style.fontWeight)});
  }
  return found;
}"""


def luminance(colour: list[int]) -> float:
    """Return the relative luminance of WCAG 2."""
    parts = [c / 255 for c in colour]
    linear = [p / 12.92 if p <= 0.04045 else ((p + 0.055) / 1.055) ** 2.4 for p in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def contrast(text: dict[str, Any]) -> float:
    """Return the contrast ratio of WCAG 2, 1 to 21."""
    low, high = sorted((luminance(text["ink"]), luminance(text["paper"])))
    return (high + 0.05) / (low + 0.05)


def fill(page: Page, server: ScriptedServer) -> None:
    """Show one of everything."""
    server.replies.append([event(tool_call="1+1"), event(tool_result="2"), *answer(WIDE, size=99)])
    ask(page, "a question with `code`")
    send(page, "/help")
    send(page, "/wrong")
    server.replies.append(refusal(503, "busy"))
    send(page, "another")
    expect(page.get_by_role("button", name="Retry")).to_be_visible()
    page.get_by_label("Message", exact=True).fill("/")
    expect(page.locator("td, th")).to_have_count(12)


def test_nothing_is_wider_than_the_screen(open_page: Opens, server: ScriptedServer):
    page = open_page(viewport={"width": 1280, "height": 844})
    sizes = "[document.documentElement.scrollWidth, document.querySelector('#scroll').scrollWidth -"
    sizes += "document.querySelector('#scroll').clientWidth, innerHeight]"
    for full in (False, True):
        if full:
            fill(page, server)
        for width in (320, 390, 768, 1280):
            page.set_viewport_size({"width": width, "height": 844})
            assert page.evaluate(sizes) == [width, 0, 844]
            box = page.get_by_label("Message", exact=True).bounding_box()
            assert box is not None
            assert box["y"] + box["height"] <= 844


def test_every_text_has_the_contrast_of_wcag_aa(open_page: Opens, server: ScriptedServer):
    page = open_page(reduced_motion="reduce")
    texts: list[dict[str, Any]] = []

    def look() -> None:
        for scheme in ("light", "dark"):
            page.emulate_media(color_scheme=scheme)
            texts.extend({**text, "scheme": scheme} for text in page.evaluate(COLOURS))

    look()
    fill(page, server)
    look()
    page.get_by_label("Message", exact=True).fill("")
    page.get_by_role("button", name="Settings").click()
    page.get_by_text("Keys and commands").click()
    look()
    page.keyboard.press("Escape")
    page.get_by_role("button", name="1.9 M parameters").click()
    look()
    assert len(texts) > 200
    large = [t for t in texts if t["size"] >= 24 or (t["size"] >= 18.66 and t["weight"] >= 700)]
    poor = [t for t in texts if contrast(t) < (3.0 if t in large else 4.5)]
    assert [(t["scheme"], t["text"], round(contrast(t), 2)) for t in poor] == []


def ground(page: Page) -> str:
    return page.evaluate("getComputedStyle(document.body).backgroundColor")


def test_light_and_dark_follow_the_system_until_one_is_chosen(open_page: Opens):
    page = open_page(color_scheme="dark")
    dark = ground(page)
    page.emulate_media(color_scheme="light")
    light = ground(page)
    assert light != dark
    page.get_by_role("button", name="Settings").click()
    page.get_by_label("Dark").check(force=True)
    assert ground(page) == dark
    page.reload()
    assert ground(page) == dark
    page.get_by_role("button", name="Settings").click()
    page.get_by_label("System").check(force=True)
    assert ground(page) == light


def test_everything_to_press_or_fill_has_a_name(page: Page, server: ScriptedServer):
    fill(page, server)
    page.get_by_role("button", name="Settings").click()
    nameless = page.evaluate("""() => {
        const named = e => e.ariaLabel || e.textContent.trim() || e.labels?.length ||
            e.getAttribute("aria-labelledby");
        return [...document.querySelectorAll("button, input, textarea, a, dialog, nav")]
            .filter(e => !named(e)).map(e => e.outerHTML);
    }""")
    assert nameless == []
    twice = page.evaluate("""() => [...document.querySelectorAll("[id]")].map(e => e.id)
        .filter((id, i, all) => all.indexOf(id) !== i)""")
    assert twice == []


def test_the_focus_goes_in_the_order_of_the_page_and_is_seen(page: Page, server: ScriptedServer):
    ask(page, "hello")
    page.get_by_role("link", name="Skip").focus()
    page.keyboard.press("Shift+Tab")
    seen: list[list[Any]] = []
    while len(seen) < 30 and (not seen or seen[-1][0] != "Send"):
        page.keyboard.press("Tab")
        seen.append(
            page.evaluate("""() => {
            const e = document.activeElement, style = getComputedStyle(e);
            const box = e.getBoundingClientRect();
            const ring = style.outlineStyle !== "none" || e.closest("form") !== null;
            return [e.ariaLabel || e.textContent.trim() || e.id, ring, box.width > 0];
        }""")
        )
    names = [name for name, _, _ in seen]
    wanted = ["Skip to the message box", "New chat", "hello", "1.9 M parameters", "Settings"]
    places = [names.index(name) for name in [*wanted, "Copy", "Regenerate"]]
    assert all(a < b for a, b in itertools.pairwise(places)), names
    assert all(ring and wide for _, ring, wide in seen), seen


def test_reduced_motion_is_kept_to(open_page: Opens, server: ScriptedServer):
    moving = """() => document.getAnimations().length"""
    for preference, animations in (("no-preference", True), ("reduce", False)):
        page = open_page(reduced_motion=preference)
        server.left.clear()
        more = begin(page, server, "slow", *answer(""))
        expect(page.locator(".writing")).to_have_text("slow")
        assert (page.evaluate(moving) > 0) == animations
        more.set()


def test_on_a_phone_the_conversations_are_in_a_drawer(open_page: Opens, server: ScriptedServer):
    page = open_page(viewport=PHONE, has_touch=True, is_mobile=True)
    drawer = page.get_by_role("navigation", name="Conversations")
    expect(drawer).to_be_hidden()
    ask(page, "hello")
    page.get_by_role("button", name="Show conversations").tap()
    expect(drawer).to_be_visible()
    page.keyboard.press("Escape")
    expect(drawer).to_be_hidden()
    page.get_by_role("button", name="Show conversations").tap()
    drawer.get_by_role("button", name="New chat").tap()
    expect(drawer).to_be_hidden()
    expect(page.locator("article")).to_have_count(0)
    small = page.evaluate("""() => [...document.querySelectorAll("header button, footer button")]
        .filter(e => e.checkVisibility() && !e.classList.contains("size"))
        .map(e => e.getBoundingClientRect())
        .filter(box => box.width < 40 || box.height < 40).length""")
    assert small == 0  # fingers are wide
