// Conversations, kept in the browser's storage. Each is a tree: an edited question and another
// answer stand beside the old ones, and `leaf` says which branch is shown. One storage item a
// conversation, so that two tabs do not overwrite each other's.

const PREFIX = "nanochat.chat.", VERSION = 1;
const MAX_TITLE = 60;
const held = new Map();   // what the storage had no room for, or all of it where there is none
const removed = new Set();   // ids of messages that were taken out, and may still be stored

const newId = () => [...crypto.getRandomValues(new Uint8Array(9))].map((byte) => byte.toString(36).padStart(2, "0")).join("");

const newConversation = () => ({v: VERSION, id: newId(), title: "", updated: Date.now(), leaf: null, messages: []});

/** All conversations, the newest first. */
function readConversations() {
  const found = new Map();
  try {
    for (let i = 0; i < localStorage.length; i += 1) {
      const name = localStorage.key(i);
      const conversation = name.startsWith(PREFIX) ? parseConversation(localStorage.getItem(name)) : null;
      if (conversation) found.set(conversation.id, conversation);
    }
  } catch {
    // The browser gives this page no storage: only `held` is left.
  }
  for (const [id, conversation] of held) found.set(id, conversation);
  return [...found.values()].sort((a, b) => b.updated - a.updated);
}

const readConversation = (id) => readConversations().find((conversation) => conversation.id === id) ?? null;

/** A stored conversation; null for what is not one of this version. */
function parseConversation(text) {
  try {
    const tree = JSON.parse(text), ids = new Set();
    const ok = tree.v === VERSION && typeof tree.id === "string" && typeof tree.title === "string" &&
      Number.isFinite(tree.updated) && tree.messages.every((message) => {
        const known = message.parent === null || ids.has(message.parent);   // parents come first: no circles
        ids.add(message.id);
        return known && (message.role === "user" ? typeof message.content === "string" :
          message.role === "assistant" && message.parts.every((part) => typeof (part.text ?? part.call) === "string"));
      }) && (tree.leaf === null || ids.has(tree.leaf));
    return ok ? tree : null;
  } catch {
    return null;
  }
}

/** Take in what another tab has stored of this conversation since. The messages here stay the same
 * objects: an answer may be on its way into one of them. */
function mergeMessages(conversation, stored) {
  const ours = new Map(conversation.messages.map((message) => [message.id, message]));
  // An answer only grows until it has ended.
  const progress = (message) => (message.state === "writing" ? 0 : 1e9) + JSON.stringify(message.parts ?? "").length;
  // What another tab has put below a message that was taken out here keeps it.
  const stays = (message) => !removed.has(message.id) || !isLeaf(stored, message);
  const merged = stored.messages.filter(stays).map((message) => {
    const own = ours.get(message.id);
    ours.delete(message.id);
    return own && progress(message) > progress(own) ? Object.assign(own, message) : own ?? message;
  });
  conversation.messages = [...merged, ...ours.values()];
}

/** Keep a conversation. Returns whether it will still be there when the page is closed. */
function writeConversation(conversation) {
  if (!conversation.messages.length) return true;
  try {
    const stored = parseConversation(localStorage.getItem(PREFIX + conversation.id));
    if (stored) mergeMessages(conversation, stored);
    localStorage.setItem(PREFIX + conversation.id, JSON.stringify(conversation));
    held.delete(conversation.id);
    return true;
  } catch {
    held.set(conversation.id, conversation);
    return false;
  }
}

function deleteConversation(id) {
  held.delete(id);
  try {
    localStorage.removeItem(PREFIX + id);
  } catch {
    // It was in `held` only.
  }
  for (const conversation of held.values()) writeConversation(conversation);   // there is room now
}

/** Add a message below `parent` and show its branch. */
function addMessage(conversation, message) {
  conversation.messages.push(message);
  conversation.leaf = message.id;
  conversation.updated = Date.now();
  if (!conversation.title && message.role === "user") {
    const line = message.content.trim().split("\n")[0];
    conversation.title = line.length > MAX_TITLE ? wellFormed(line.slice(0, MAX_TITLE - 1)) + "\u2026" : line;
  }
  return message;
}

const messageOf = (conversation, id) => conversation.messages.find((message) => message.id === id);

/** The messages of the branch that is shown, oldest first. */
function shownMessages(conversation) {
  const path = [];
  for (let id = conversation.leaf; id !== null;) {
    const message = messageOf(conversation, id);
    path.unshift(message);
    id = message.parent;
  }
  return path;
}

/** The messages that stand where `message` does, itself included, oldest first. */
const siblingsOf = (conversation, message) =>
  conversation.messages.filter((other) => other.parent === message.parent && other.role === message.role);

/** Show the branch of `message`, down to its newest leaf. */
function showBranch(conversation, message) {
  let leaf = message;
  for (let child = leaf; child; child = conversation.messages.findLast((other) => other.parent === leaf.id)) leaf = child;
  conversation.leaf = leaf.id;
}

/** Return whether nothing stands below a message. */
const isLeaf = (conversation, message) => !conversation.messages.some((other) => other.parent === message.id);

/** Take a message without children out again. */
function removeLeaf(conversation, message) {
  removed.add(message.id);
  conversation.messages = conversation.messages.filter((other) => other !== message);
  if (conversation.leaf === message.id) conversation.leaf = message.parent;
}

/** What the model sees of an answer in later turns: all that it wrote, and the calculator's results. */
const written = (message) => message.parts.map(({text, marker, call, result}) =>
  call === undefined ? marker ?? text : result === undefined ? "" : `<<${call}=${result}>>`).join("");

/** {messages, forgotten}: the conversation up to the question `last`, as the server takes it.
 * Questions that have no answer are left out; so are the oldest turns beyond the server's limits. */
function promptFor(conversation, last, limits) {
  const turns = [], path = [];
  for (let message = last; message; message = messageOf(conversation, message.parent)) path.unshift(message);
  for (let i = 0; i + 1 < path.length; i += 1) {
    const [question, answer] = [path[i], path[i + 1]];
    if (question.role !== "user" || answer.role !== "assistant") continue;
    const said = wellFormed(written(answer).slice(0, limits.message));
    if (said.trim()) turns.push({role: "user", content: question.content}, {role: "assistant", content: said});
  }
  const all = turns.length;
  const size = () => turns.reduce((sum, turn) => sum + turn.content.length, last.content.length);
  while (turns.length && (size() > limits.total || turns.length + 1 > limits.messages)) turns.splice(0, 2);
  return {messages: [...turns, {role: "user", content: last.content}], forgotten: all - turns.length};
}

/** Half of a pair, as typing or cutting may leave it, is no text that a server can read. */
const wellFormed = (text) => text.replace(/[\uD800-\uDBFF](?![\uDC00-\uDFFF])|(?<![\uD800-\uDBFF])[\uDC00-\uDFFF]/g, "\uFFFD");
