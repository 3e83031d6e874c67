// The page: which conversation is shown, what is being written, and what keys and buttons do.

const get = (id) => document.getElementById(id);
const log = get("log"), scroller = get("scroll"), text = get("text");
const SMALL = matchMedia("(max-width: 800px)"), HAS_KEYS = matchMedia("(pointer: fine)");
const TINY = 100e6, SMALL_MODEL = 3e9;   // parameters
const IDEAS = ["Who are you?", "What is 5 + 9?", "Spell the word river", "What can you do?"];
const SAVE_EVERY = 1000;   // milliseconds, while an answer is written

let current = newConversation();
let info = {};              // what /stats said
let notes = [];             // {after, node}: what commands said, below the message `after`
let warned = false;         // that the storage is full
let leaving = false;        // the page is being closed: what breaks now is no failure
const runs = new Map();     // id of a conversation -> the answer being written in it

/** Tell screen readers. */
const say = (words) => { get("status").textContent = words; };

// ---- sending and receiving -----------------------------------------------------------------------

function ask(question, parent) {
  const message = addMessage(current, {id: newId(), parent, role: "user", content: question});
  answer(current, message);
}

/** Have the question answered, beside the answers that it has. */
async function answer(conversation, question) {
  const message = addMessage(conversation, {id: newId(), parent: question.id, role: "assistant", parts: [], state: "writing", tokens: 0, seconds: 0});
  const run = {message, conversation, controller: new AbortController(), started: performance.now(), tokens: 0, saved: -SAVE_EVERY, timer: null, drawn: true};
  const {messages, forgotten} = promptFor(conversation, question, limits);
  runs.set(conversation.id, run);
  keep(conversation);
  if (conversation === current) {
    history.replaceState(null, "", "#" + conversation.id);
    drawThread();
    scrollToEnd();
    if (forgotten) addNote(`The oldest ${forgotten} messages no longer fit and were not sent.`);
  }
  drawList();
  say("The model is writing.");
  try {
    for await (const event of askServer({messages, ...sampling()}, run.controller.signal)) take(run, event);
    message.state = "done";
  } catch (error) {
    message.state = error.name === "AbortError" ? "stopped" : "failed";
    if (message.state === "failed") message.error = error instanceof Failure ? error.message : "The page failed: " + error.message;
  }
  end(run);
}

/** Add one event to the answer. */
function take(run, {token, marker, tool_call: call, tool_result: result, usage}) {
  const {message} = run, last = message.parts.at(-1);
  if (token !== undefined) {
    run.tokens += 1;
    if (typeof marker === "string") message.parts.push({text: token, marker});
    else if (last?.text !== undefined && last.marker === undefined) last.text += token;
    else message.parts.push({text: token});
  }
  if (call !== undefined) message.parts.push({call: String(call)});
  if (result !== undefined) {
    const open = message.parts.findLast((part) => part.call !== undefined && part.result === undefined);
    if (open) open.result = String(result);
  }
  if (usage) {
    Object.assign(message, {tokens: usage.completion_tokens, seconds: usage.seconds, finish: usage.finish_reason});
  }
  if (run.drawn && run.conversation === current) {
    run.drawn = false;
    requestAnimationFrame(() => { run.drawn = true; drawRun(run); });
  }
  run.timer ??= setTimeout(() => {   // the last words too are kept, should nothing follow for long
    run.timer = null;
    run.saved = performance.now();
    if (runs.get(run.conversation.id) === run) keep(run.conversation);
  }, Math.max(0, run.saved + SAVE_EVERY - performance.now()));
}

function drawRun(run) {
  if (run.conversation !== current) return;
  const follow = atEnd();
  drawMessage(current, run.message);
  if (follow) scrollToEnd();
  drawDown();
}

function end(run) {
  const {message, conversation} = run;
  if (leaving) {   // what was kept last says that the answer was being written
    setTimeout(end, 100, run);   // if the page stays after all
    return;
  }
  message.seconds ||= (performance.now() - run.started) / 1000;
  message.tokens ||= run.tokens;
  runs.delete(conversation.id);
  conversation.updated = Date.now();
  if (!run.dropped) keep(conversation);
  drawList();
  if (!info.parameters && message.state === "done") loadStats();   // it was still starting
  if (conversation !== current) return;
  const follow = atEnd(), stopHadFocus = document.activeElement === get("stop");
  drawThread();
  if (follow) scrollToEnd();
  if (stopHadFocus) text.focus();
  const said = message.state === "failed" ? message.error : answerText(message).slice(0, 2000);
  say(message.state === "stopped" ? "Stopped." : said);
}

function stop() {
  runs.get(current.id)?.controller.abort();
}

/** Write another answer to the question of an answer. */
function answerAgain(id) {
  if (runs.has(current.id)) return;
  const message = messageOf(current, id), question = messageOf(current, message.parent);
  if (!message.parts.length && isLeaf(current, message)) removeLeaf(current, message);
  answer(current, question);
  focusText();
}

function editMessage(id) {
  const message = messageOf(current, id);
  if (runs.has(current.id) || elements.get(id).querySelector("form")) return;
  drawEditor(message, {
    done: (content) => { ask(content, message.parent); focusText(); },
    cancel: () => text.focus(),
  });
}

function chooseBranch(id, label) {
  showBranch(current, messageOf(current, id));
  keep(current);
  drawThread();
  const buttons = elements.get(id).querySelectorAll(".versions button");
  (label === "Next" ? [...buttons].reverse() : [...buttons]).find((button) => !button.disabled)?.focus();
}

function keep(conversation) {
  if (writeConversation(conversation) || warned) return;
  warned = true;
  notice("The browser has no room left to keep this conversation: it is lost when the page is closed. Deleting old conversations makes room.");
}

// ---- the conversation that is shown --------------------------------------------------------------

function drawThread() {
  const shown = shownMessages(current), nodes = [];
  const notesAfter = (id) => nodes.push(...notes.filter((note) => note.after === id).map((note) => note.node));
  notesAfter(null);
  for (const message of shown) {
    nodes.push(drawMessage(current, message));
    notesAfter(message.id);
  }
  const focused = document.activeElement;
  if (nodes.length !== log.childNodes.length || nodes.some((node, i) => log.childNodes[i] !== node)) {
    log.replaceChildren(...nodes);
    if (log.contains(focused)) focused.focus({preventScroll: true});
  }
  get("hello").hidden = nodes.length > 0;
  drawComposer();
  drawDown();
}

function show(conversation) {
  current = conversation;
  notes = [];
  elements.clear();
  log.replaceChildren();
  drawThread();
  drawList();
  scrollToEnd();
  document.title = (conversation.title || "New chat") + " \u00b7 " + (info.model ?? "nanochat");
}

function openNew() {
  show(newConversation());
  history.replaceState(null, "", location.pathname + location.search);
  closeDrawer();
  focusText();
}

function openConversation(id) {
  if (id !== current.id) {
    const found = runs.get(id)?.conversation ?? readConversation(id);
    if (!found) return false;
    show(found);
    history.replaceState(null, "", "#" + id);
  }
  closeDrawer();
  return true;
}

/** Show words, or an element of them, below the newest message. */
function addNote(words, {wrong = false} = {}) {
  const node = make("div", {class: wrong ? "note wrong" : "note"}, words);
  notes.push({after: current.leaf, node});
  drawThread();
  scrollToEnd();
  say(node.innerText);
}

const atEnd = () => scroller.scrollHeight - scroller.scrollTop - scroller.clientHeight < 80;
function scrollToEnd() { scroller.scrollTop = scroller.scrollHeight; }
function drawDown() { get("down").hidden = atEnd(); }

// ---- what the server is --------------------------------------------------------------------------

/** "1.9 M". */
function inWords(count) {
  const [unit, name] = [[1e12, " T"], [1e9, " B"], [1e6, " M"], [1e3, " K"]].find(([size]) => count >= size) ?? [1, ""];
  const value = count / unit;
  return (value >= 10 || unit === 1 ? Math.round(value) : value.toFixed(1)) + name;
}

/** What to expect of a model of this size. */
function aboutModel(count) {
  const size = `This model has ${inWords(count)} parameters`;
  if (count < TINY) return `${size}, very few: it was made to try things out, writes a lot of nonsense and knows almost nothing. Do not rely on its answers.`;
  if (count < SMALL_MODEL) return `${size}: it is small. It talks, but makes many things up and says them with confidence.`;
  return `${size}. It can be wrong: check what matters.`;
}

async function loadStats() {
  info = await readStats();
  takeDefaults(info);
  const count = Number(info.parameters) || 0, name = typeof info.model === "string" ? info.model : "nanochat";
  get("model").textContent = name;
  document.title = (current.title || "New chat") + " \u00b7 " + name;
  get("hello-text").textContent = count ? aboutModel(count) : "";
  get("size").hidden = !count;
  get("size").replaceChildren(inWords(count), make("i", {}, " parameters"));
  get("size").title = "What to expect";
  drawComposer();
}

// ---- beginning -----------------------------------------------------------------------------------

get("form").addEventListener("submit", (event) => { event.preventDefault(); submit(); });
text.addEventListener("keydown", onTextKey);
text.addEventListener("input", () => { keepDraft(); drawComposer(); });
document.addEventListener("keydown", onKey);
get("stop").addEventListener("click", stop);
get("new").addEventListener("click", openNew);
get("header-new").addEventListener("click", openNew);
get("down").addEventListener("click", scrollToEnd);
get("show").addEventListener("click", () => setDrawer(true));
get("hide").addEventListener("click", () => setDrawer(false));
get("shade").addEventListener("click", () => setDrawer(false));
get("size").addEventListener("click", () => notice(aboutModel(Number(info.parameters))));
get("open-settings").addEventListener("click", openSettings);
get("settings").addEventListener("close", () => get("open-settings").focus());
get("settings").addEventListener("click", (event) => { if (event.target === get("settings")) get("settings").close(); });
get("defaults").addEventListener("click", () => {
  for (const name of [...Object.keys(NUMBERS), "theme"]) changeSetting(name, null);
  applyTheme();
  get("settings").close();
  drawComposer();
});
for (const name of Object.keys(NUMBERS)) get(name).addEventListener("change", () => takeNumber(name));
get("settings-form").addEventListener("change", (event) => {
  if (event.target.name !== "theme") return;
  changeSetting("theme", event.target.value);
  applyTheme();
});
scroller.addEventListener("scroll", drawDown, {passive: true});
SMALL.addEventListener("change", closeDrawer);
addEventListener("resize", drawComposer);
addEventListener("hashchange", () => openConversation(location.hash.slice(1)));
for (const leave of ["beforeunload", "pagehide"]) {   // not every browser tells the first
  addEventListener(leave, () => {
    leaving = true;
    for (const run of runs.values()) keep(run.conversation);
    setTimeout(() => { leaving = false; }, 2000);   // it may stay after all
  });
}
addEventListener("storage", (event) => {   // another tab wrote
  drawList();
  const id = event.key?.startsWith(PREFIX) ? event.key.slice(PREFIX.length) : null;
  const theirs = id === current.id && event.newValue ? parseConversation(event.newValue) : null;
  if (!theirs || runs.has(id)) return;
  // Of two tabs that write at once the later one has not seen the other's messages: they are added again.
  const isLost = (message) => (message.role === "user" || message.parts.length) && !messageOf(theirs, message.id);
  if (current.messages.some(isLost)) keep(current);
  show(readConversation(id) ?? current);   // not `theirs`: the event may come after later words of this tab
});

get("ideas").append(...IDEAS.map((idea) => make("li", {}, make("button", {type: "button", onclick: () => { setDraft(idea); submit(); }}, idea))));
get("keys").append(keyList([["Enter", "send"], ["Shift+Enter", "new line"], ["Esc", "stop the answer"], ["Ctrl+Shift+N, Alt+N", "new chat"],
  ["Arrow up", "in the empty box: edit your last message"], ["/", "go to the message box"], ...commandPairs()]));
text.value = readDraft();
applyTheme();
drawDrawer();
show(readConversation(location.hash.slice(1)) ?? current);
loadStats();
focusText();
