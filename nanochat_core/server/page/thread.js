// One message on the page: how an answer, a question and their buttons are drawn.

const elements = new Map();   // id of a message -> its element

/** Markdown of an answer with a mark for each call, and what draws the marks. */
function answerSource(message) {
  const marks = [];
  const source = joinParts(message, (text) => text.replace(/[\uE000\uE001]/g, "\uFFFD"), (part, i) => {
    // Another mark once the result is there or cannot come, so that the text around it is drawn anew.
    const waits = part.result === undefined && message.state === "writing" && part === message.parts.at(-1);
    const mark = 3 * i + (waits ? 0 : part.result === undefined ? 1 : 2);
    marks[mark] = () => callNode(part, waits);
    return `\uE000${mark}\uE001`;
  });
  return {source, marks};
}

/** The parts of an answer as one text. What follows a marker, a final number, is a line of its own. */
function joinParts(message, drawText, drawCall) {
  let all = "";
  for (const [i, part] of message.parts.entries()) {
    all += part.call === undefined ? drawText(part.text) : drawCall(part, i);
    if (part.marker !== undefined && all && !all.endsWith("\n")) all += "\n";
  }
  return all;
}

function callNode({call, result}, waits) {
  const node = make("span", {class: "call", title: "The model used its calculator"},
    make("span", {class: "unseen"}, "calculator: "), make("span", {}, call));
  if (result !== undefined) node.append(" = ", make("b", {}, result));
  else if (waits) node.append(make("span", {class: "pending"}, " = \u2026"));
  return node;
}

/** The answer as text, for the clipboard and for screen readers. */
const answerText = (message) => joinParts(message, (text) => text,
  ({call, result}) => result === undefined ? `[${call}]` : `[${call} = ${result}]`);

/** The element of a message, drawn as it is now. */
function drawMessage(conversation, message) {
  let element = elements.get(message.id);
  if (!element) {
    element = message.role === "user" ? questionElement(message) : answerElement();
    element.dataset.id = message.id;
    elements.set(message.id, element);
  }
  if (message.role === "assistant") drawAnswer(element, conversation, message);
  drawFoot(element, conversation, message);
  return element;
}

const questionElement = (message) => make("article", {class: "message user", "aria-label": "You"},
  make("div", {class: "bubble"}, message.content), make("div", {class: "foot"}));

const answerElement = () => make("article", {class: "message assistant", "aria-label": "Answer"},
  make("div", {class: "body"}), make("div", {class: "problem", hidden: true}), make("div", {class: "foot"}));

function drawAnswer(element, conversation, message) {
  const body = element.querySelector(".body");
  const {source, marks} = answerSource(message);
  drawMarkdown(body, source, marks);
  const writing = runs.get(conversation.id)?.message === message;
  body.classList.toggle("writing", writing);
  element.setAttribute("aria-busy", String(writing));
  drawProblem(element.querySelector(".problem"), conversation, message, writing);
}

function drawProblem(element, conversation, message, writing) {
  const begun = message.parts.length > 0;
  let text = "";
  if (message.state === "failed") text = message.error;
  else if (message.state === "writing" && !writing) text = "The page was closed while this was being written.";
  else if (message.state === "stopped") text = begun ? "Stopped." : "Stopped before the first word.";
  else if (message.state === "done" && !begun) text = "The model said nothing.";
  element.hidden = !text;
  element.classList.toggle("wrong", message.state === "failed");
  if (element.dataset.text === text) return;
  element.dataset.text = text;
  const retry = make("button", {type: "button", class: "plain retry", onclick: () => answerAgain(message.id)}, "Retry");
  element.replaceChildren(make("span", {}, text), ...(message.state === "failed" ? [retry] : []));
}

/** The buttons and numbers below a message. The buttons stay the same nodes, so focus stays too. */
function drawFoot(element, conversation, message) {
  const foot = element.querySelector(":scope > .foot");   // an open editor has one too
  const running = runs.get(conversation.id), writing = running?.message === message;
  if (!foot.childNodes.length) foot.append(...footButtons(message), make("span", {class: "versions"}), make("span", {class: "meta"}));
  for (const button of foot.querySelectorAll(":scope > button")) button.hidden = writing;
  for (const button of foot.querySelectorAll("[data-needs=idle]")) button.disabled = Boolean(running);
  if (message.state === "failed") foot.querySelector("[data-needs=idle]").hidden = true;   // "Retry" does the same
  drawVersions(foot.querySelector(".versions"), conversation, message, Boolean(running));
  const meta = foot.querySelector(".meta"), text = message.role === "assistant" ? numbersOf(message, writing ? running : null) : "";
  if (meta.textContent !== text) meta.textContent = text;
}

function footButtons(message) {
  const copy = make("button", {type: "button", class: "plain", onclick: (event) =>
    copyText(message.role === "user" ? message.content : answerText(message), event.currentTarget)}, "Copy");
  const [label, act] = message.role === "user" ? ["Edit", editMessage] : ["Regenerate", answerAgain];
  return [copy, make("button", {type: "button", class: "plain", "data-needs": "idle", onclick: () => act(message.id)}, label)];
}

function drawVersions(element, conversation, message, busy) {
  const all = siblingsOf(conversation, message), here = all.indexOf(message);
  const state = all.length > 1 ? `${here}/${all.length}/${busy}` : "";
  if (element.dataset.state === state) return;
  element.dataset.state = state;
  if (all.length < 2) return element.replaceChildren();
  const what = message.role === "user" ? "question" : "answer";
  const step = (by, sign, label) => make("button", {type: "button", class: "plain", "aria-label": `${label} ${what}`,
    disabled: busy || !all[here + by], onclick: () => chooseBranch(all[here + by].id, label)}, sign);
  element.replaceChildren(step(-1, "\u2039", "Previous"), make("span", {}, `${here + 1} of ${all.length}`), step(1, "\u203a", "Next"));
}

/** "128 tokens, 42 tokens/s, 3.0 s": as counted here, until the server says it. */
function numbersOf(message, run) {
  const tokens = run ? run.tokens : message.tokens;
  const seconds = run ? (performance.now() - run.started) / 1000 : message.seconds;
  if (!tokens || !seconds) return "";
  const rate = tokens / seconds;
  const numbers = [`${tokens.toLocaleString("en")} token${tokens === 1 ? "" : "s"}`,
    `${rate >= 10 ? Math.round(rate).toLocaleString("en") : rate.toFixed(1)} tokens/s`];
  if (!run) numbers.push(seconds < 0.95 ? `${Math.round(seconds * 1000)} ms` : `${seconds.toFixed(1)} s`);
  if (message.finish === "length") numbers.push("cut at the length limit");
  return numbers.join(" \u00b7 ");
}

/** Put a small form in the place of a question. */
function drawEditor(message, {done, cancel}) {
  const element = elements.get(message.id), bubble = element.querySelector(".bubble"), foot = element.querySelector(".foot");
  const area = make("textarea", {"aria-label": "Edit the message", rows: "1"});
  const warning = make("span", {class: "meta"});
  const form = make("form", {class: "editor"}, area, make("div", {class: "foot"},
    make("button", {class: "main", type: "submit"}, "Send"),
    make("button", {class: "plain", type: "button", onclick: () => close(cancel)}, "Cancel"), warning));
  const close = (then) => {
    form.remove();
    bubble.hidden = foot.hidden = false;
    then();
  };
  form.addEventListener("submit", (event) => {
    event.preventDefault();
    const text = wellFormed(area.value).trim();
    if (runs.has(current.id)) warning.textContent = "The model is still writing; Escape stops it.";
    else if (!text || text.length > limits.message) warning.textContent = lengthProblem(text);
    else close(() => done(text));
  });
  area.addEventListener("keydown", (event) => {
    if (event.key === "Escape") {
      event.stopPropagation();
      if (runs.has(current.id)) stop();   // the edit stays
      else close(cancel);
    }
    if (isEnter(event)) { event.preventDefault(); form.requestSubmit(); }
  });
  area.addEventListener("input", () => fitHeight(area));
  bubble.hidden = foot.hidden = true;
  element.prepend(form);
  area.value = message.content;
  fitHeight(area);
  area.focus();
}

const isEnter = (event) => event.key === "Enter" && !event.shiftKey && !event.isComposing && event.keyCode !== 229;

const lengthProblem = (text) => text ?
  `${text.length.toLocaleString("en")} characters; a message has at most ${limits.message.toLocaleString("en")}` : "a message needs some text";

function fitHeight(area) {
  area.style.height = "auto";
  area.style.height = area.scrollHeight + 2 + "px";
}
