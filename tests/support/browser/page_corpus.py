"""Hostile texts for the chat page, and what none of them may do to it."""

import json

from playwright.sync_api import Page

from tests.support.browser.chat import answers

HOSTILE = [
    "<script>window.hit = 1</script>",
    "<img src=x onerror='window.hit = 1'>",
    '"><svg onload=window.hit=1>',
    "<svg><animate onbegin=window.hit=1 attributeName=x dur=1s></svg>",
    "<math><mtext><table><mglyph><style><img src=x onerror=window.hit=1>",
    "<iframe srcdoc='<script>parent.hit=1</script>'></iframe>",
    "<a href='javascript:window.hit=1'>click</a>",
    "<style>* { display: none }</style>",
    "<base href='https://elsewhere.example/'><form action=//elsewhere.example><button>x",
    "<meta http-equiv=refresh content='0;url=https://elsewhere.example'>",
    "<details open ontoggle=window.hit=1>x</details>",
    "[click](javascript:window.hit=1)",
    "[click](JaVaScRiPt&#58;window.hit=1)",
    "[click]( \tjavascript:window.hit=1)",
    "[click](java\u0000script:window.hit=1)",
    "[click](data:text/html,<script>window.hit=1</script>)",
    "[click](vbscript:msgbox)",
    "[click](file:///etc/passwd)",
    "[click](//elsewhere.example)",
    "[click](blob:https://elsewhere.example/1)",
    "![](https://elsewhere.example/pixel.png)",
    "![x](javascript:window.hit=1)",
    "[a](https://ok.example/\"onmouseover=\"window.hit=1)",
    "[a](https://ok.example 'x' onclick=window.hit=1)",
    "<https://elsewhere.example/><javascript:window.hit=1>",
    "```html\n<script>window.hit=1</script>\n```",
    '```" onmouseover="window.hit=1\ncode\n```',
    "`<img src=x onerror=window.hit=1>`",
    "| <img src=x onerror=window.hit=1> | b |\n| --- | --- |\n| <b>x</b> | [c](javascript:1) |",
    "# <script>window.hit=1</script>\n- <img src=x onerror=window.hit=1>",
    "> <svg onload=window.hit=1>",
    "\u202egnp.exe <script>window.hit=1\ufeff</script>\u2066\u2069",
    "\U0001f600 \ue0000\ue001 \ue00099\ue001 \u0000 \ufffd \u2028 \u2029",
    "&lt;script&gt;window.hit=1&lt;/script&gt; &#60;img src=x onerror=window.hit=1&#62;",
    "<!--[if gte IE 4]><script>window.hit=1</script><![endif]-->",
    "</script></style></textarea></title><script>window.hit=1</script>",
    "${window.hit=1} {{window.hit=1}} #{window.hit=1}",
    "__proto__ constructor [__proto__](https://ok.example/__proto__)",
]  # fmt: skip
RUNS = [
    "<script>window.hit = 1</script>",
    "<img src=x onerror=window.hit=1>",
    "<svg/onload=window.hit=1>",
    "<video><source onerror=window.hit=1></video>",
    "<body onpageshow=window.hit=1>",
    "<input autofocus onfocus=window.hit=1>",
    "<marquee onstart=window.hit=1>",
    "<object data=javascript:window.hit=1>",
    "<embed src=javascript:window.hit=1>",
    "<iframe src=javascript:parent.hit=1>",
    "<a href=javascript:window.hit=1>x</a>",
    "<template><script>window.hit=1</script></template>",
    "<noscript><p title='</noscript><img src=x onerror=window.hit=1>'>",
    "<link rel=stylesheet href=https://elsewhere.example/x.css>",
    "javascript:window.hit=1",
    "JAVASCRIPT&colon;window.hit=1",
    "data:text/html;base64,PHNjcmlwdD5wYXJlbnQuaGl0PTE8L3NjcmlwdD4=",
    "https://ok.example/\"onmouseover=\"window.hit=1",
]  # fmt: skip
PLACES = [
    "{}", "**{}**", "`{}`", "[{}](https://ok.example)", "[x]({})", "![{}]({})", "<{}>", "# {}",
    "- {}", "> {}", "```{}\nx\n```", "| {} | b |\n|---|---|\n| {} | c |", "~~*{}*~~\\{}",
]  # fmt: skip
EVERYWHERE = [*HOSTILE, *(place.replace("{}", run) for place in PLACES for run in RUNS)]
ALLOWED = {
    *("P", "BR", "UL", "OL", "LI", "H3", "H4", "H5", "H6", "BLOCKQUOTE", "HR", "DIV", "SPAN"),
    *("FIGURE", "FIGCAPTION", "PRE", "CODE", "BUTTON", "STRONG", "EM", "S", "B", "A"),
    *("TABLE", "THEAD", "TBODY", "TR", "TH", "TD"),
}
INSPECT = """bodies => bodies.flatMap(body => [...body.querySelectorAll("*")]).map(element => [
  element.tagName, element.href ?? "",
  element.getAttributeNames().filter(name => name.startsWith("on") || name === "style")])"""


def harm(page: Page) -> list[str]:
    """Return what hostile text did to the page: a script that ran, or elements with a use."""
    found: list[str] = []
    for tag, href, attributes in answers(page).evaluate_all(INSPECT):
        if tag not in ALLOWED:
            found.append(f"element {tag}")
        if href and not href.startswith(("https://", "http://")):
            found.append(f"link to {href}")
        if attributes:
            found.append(f"attributes {attributes} of {tag}")
    if page.evaluate("window.hit") is not None:
        found.append("a script ran")
    return found


def show_stored(page: Page, texts: list[str]) -> None:
    """Show a conversation from the browser's storage: each text as a question and its answer."""
    messages: list[dict] = []
    for i, text in enumerate(texts):
        before = messages[-1]["id"] if messages else None
        question = {"id": f"q{i}", "parent": before, "role": "user", "content": text}
        said = {"role": "assistant", "parts": [{"text": text}], "state": "done"}
        messages += [question, {"id": f"a{i}", "parent": f"q{i}", **said}]
    tree = {"v": 1, "id": "x", "title": "t", "updated": 1, "messages": messages}
    stored = json.dumps({**tree, "leaf": messages[-1]["id"]})
    page.evaluate("stored => localStorage.setItem('nanochat.chat.x', stored)", stored)
    page.goto(page.url.split("#")[0] + "#x")
    page.reload()
