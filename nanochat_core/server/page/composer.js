// The message box with its keys, and the settings.

function submit() {
  const typed = wellFormed(text.value), line = typed.trim();
  if (/^\/[^/]/.test(typed) || typed === "/") return submitCommand(line);
  const question = line.startsWith("//") ? line.slice(1) : line;
  if (!question) return;
  if (runs.has(current.id)) return say("The model is still writing; Escape stops it.");
  if (question.length > limits.message) return drawComposer();
  setDraft("");
  ask(question, current.leaf);
  if (!HAS_KEYS.matches) text.blur();   // makes room: the keyboard on the glass goes away
}

function submitCommand(line) {
  try {
    const words = runCommand(line);
    setDraft("");
    if (words) addNote(words);
  } catch (error) {
    if (!(error instanceof Failure)) throw error;
    addNote(error.message, {wrong: true});   // what was typed stays, to be mended
  }
}

function setDraft(words) {
  text.value = words;
  keepDraft();
  drawComposer();
}

function keepDraft() {
  try {
    sessionStorage.setItem("nanochat.draft", text.value);
  } catch {
    // Only a reload would miss it.
  }
}

function readDraft() {
  try {
    return sessionStorage.getItem("nanochat.draft") ?? "";
  } catch {
    return "";
  }
}

function drawComposer() {
  fitHeight(text);
  const running = runs.has(current.id), typed = text.value.trim();
  const hadFocus = document.activeElement === get("send");
  get("send").hidden = running;
  get("stop").hidden = !running;
  if (running && hadFocus) get("stop").focus();
  const over = typed.length > limits.message;
  get("under").textContent = over ? lengthProblem(typed) : underLine();
  get("under").classList.toggle("wrong", over);
  text.setAttribute("aria-invalid", String(over));
  const matching = matchingCommands(text.value);
  get("commands").hidden = !matching.length;
  get("commands").replaceChildren(...matching.map(({name, takes, says}) =>
    make("li", {}, make("button", {type: "button", tabindex: "-1", onclick: () => { setDraft(`/${name}${takes ? " " : ""}`); text.focus(); }},
      make("code", {}, `/${name}`), ` ${takes}`), make("span", {}, says))));
}

function underLine() {
  const parts = [`temperature ${setting("temperature")}`, `top k ${setting("top_k")}`, `up to ${setting("max_tokens")} tokens`];
  if (setting("seed") !== null) parts.push(`seed ${setting("seed")}`);
  return parts.join(" \u00b7 ");
}

function focusText() {
  if (HAS_KEYS.matches) text.focus();
}

function onTextKey(event) {
  if (isEnter(event)) {
    event.preventDefault();
    submit();
  } else if (event.key === "ArrowUp" && !text.value) {
    const last = shownMessages(current).findLast((message) => message.role === "user");
    if (!last || runs.has(current.id)) return;
    event.preventDefault();
    editMessage(last.id);
  } else if (event.key === "Tab" && !event.shiftKey) {
    const [first] = matchingCommands(text.value);
    if (!first || text.value === "/" + first.name) return;
    event.preventDefault();
    setDraft(`/${first.name}${first.takes ? " " : ""}`);
  }
}

function onKey(event) {
  const letter = event.key.toLowerCase();
  if (letter === "n" && ((event.ctrlKey && event.shiftKey) || (event.altKey && !event.ctrlKey)) && !event.metaKey) {
    event.preventDefault();
    openNew();
  } else if (event.key === "Escape" && !get("settings").open) {
    if (document.body.classList.contains("drawer")) setDrawer(false);
    else if (!get("notice").hidden) get("notice").hidden = true;
    else stop();
  } else if (event.key === "/" && !event.target.closest("input, textarea, dialog")) {
    event.preventDefault();
    text.focus();
  }
}

function openSettings() {
  for (const [name, {low, high}] of Object.entries(NUMBERS)) {
    Object.assign(get(name), {min: low, max: high, value: setting(name) ?? ""});
    get(name).setCustomValidity("");
  }
  get("settings-form").elements.theme.value = chosen.theme ?? "auto";
  get("settings").showModal();
}

function takeNumber(name) {
  const input = get(name), value = input.value === "" && !input.validity.badInput ? null : input.valueAsNumber;
  const problem = value === null ? null : problemWith(name, value);
  input.setCustomValidity(problem ?? "");
  if (problem) return input.reportValidity();
  changeSetting(name, value);
  drawComposer();
}
