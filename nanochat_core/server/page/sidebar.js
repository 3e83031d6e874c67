// The list of conversations, and the drawer that holds it on small screens.

function drawList() {
  const focused = get("list").contains(document.activeElement) ? document.activeElement.dataset.key : null;
  get("list").replaceChildren(...readConversations().map((conversation) => {
    const {id, title} = conversation;
    const button = (key, label, sign, act) => make("button", {type: "button", class: "icon", "data-key": key + id, "aria-label": `${label} "${title}"`, title: label, onclick: act}, sign);
    return make("li", {"data-id": id},
      make("button", {type: "button", class: "title", "data-key": "open" + id, "aria-current": id === current.id ? "true" : null,
        onclick: () => { openConversation(id); focusText(); }},
      make("span", {}, title || "Untitled"), ...(runs.has(id) ? [make("i", {class: "dot", title: "writing"})] : [])),
      button("rename", "Rename", icon("M4 16l1-4 8-8 3 3-8 8zM11 6l3 3"), () => renameConversation(id)),
      button("delete", "Delete", icon("M5 5l10 10M15 5L5 15"), () => dropConversation(id)));
  }));
  if (focused) get("list").querySelector(`[data-key="${focused}"]`)?.focus();
}

function renameConversation(id) {
  const conversation = id === current.id ? current : runs.get(id)?.conversation ?? readConversation(id);
  const item = get("list").querySelector(`[data-id="${id}"]`);
  const input = make("input", {"aria-label": "Name of the conversation", maxlength: "120"});
  let open = true;
  const close = (name) => {
    if (!open) return;
    open = false;
    if (name) conversation.title = wellFormed(name);
    keep(conversation);
    drawList();
    get("list").querySelector(`[data-key="rename${id}"]`)?.focus();
  };
  input.value = conversation.title;
  input.addEventListener("keydown", (event) => {
    if (event.key !== "Escape" && !isEnter(event)) return;
    event.preventDefault();   // or the key would press the button that gets the focus
    event.stopPropagation();
    close(event.key === "Escape" ? null : input.value.trim());
  });
  input.addEventListener("blur", () => close(input.value.trim()));
  item.replaceChildren(input);
  input.focus();
  input.select();
}

function dropConversation(id) {
  const running = runs.get(id);
  const conversation = running?.conversation ?? (id === current.id ? current : readConversation(id));
  if (running) {
    running.dropped = true;   // its end is not kept
    running.controller.abort();
  }
  deleteConversation(id);
  if (id === current.id) openNew();
  drawList();
  notice(`Deleted "${conversation.title}".`, {Undo: () => {
    keep(conversation);
    drawList();
    openConversation(id);
  }});
}

/** Say something at the edge of the page, with a button where there is something to do. */
function notice(words, actions = {}) {
  const box = get("notice"), close = () => { box.hidden = true; focusText(); };
  const buttons = Object.entries({...actions, Close: () => {}}).map(([label, act]) =>
    make("button", {type: "button", class: "plain", onclick: () => { close(); act(); }}, label));
  box.replaceChildren(make("span", {}, words), ...buttons);
  box.hidden = false;
}

function drawDrawer() {
  const open = SMALL.matches ? document.body.classList.contains("drawer") : chosen.sidebar ?? true;
  get("sidebar").hidden = !open;
  get("show").hidden = open && !SMALL.matches;
  get("show").setAttribute("aria-expanded", String(open));
  get("room").inert = open && SMALL.matches;
  get("shade").hidden = !(open && SMALL.matches);
}

function setDrawer(open) {
  if (SMALL.matches) document.body.classList.toggle("drawer", open);
  else changeSetting("sidebar", open);
  drawDrawer();
  if (open) get("new").focus();
  else get("show").focus();
}

function closeDrawer() {
  document.body.classList.remove("drawer");
  drawDrawer();
}
