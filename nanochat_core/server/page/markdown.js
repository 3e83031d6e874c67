// Markdown as DOM nodes. What a model writes only ever becomes text nodes and a few attributes that
// are checked here; no string is parsed as HTML. The work grows with the length of the text: an
// answer is drawn again with every frame while it is written.

const MAX_DEPTH = 6;            // of lists and quotes inside each other, and of styles in a line
const CALL_MARK = /\uE000(\d+)\uE001/y;   // where a tool call stands in an answer, see `thread.js`
// All that repeats is bounded, or what follows it cannot be part of it: no search starts over.
const LINK = /\[([^[\]\n]{1,500})\]\(\s{0,20}<?([^\s<>()]{0,2000}(?:\([^\s<>()]{0,500}\)[^\s<>()]{0,2000})?)>?(?:\s{1,20}"[^"\n]{0,300}")?\s{0,20}\)/y;
const ADDRESS = /https?:\/\/[^\s<>"`\uE000]{1,2000}/y;
const WORD = /[\p{L}\p{N}_]/u;
const STYLES = {"***": ["strong", "em"], "**": ["strong"], "__": ["strong"], "*": ["em"], "_": ["em"], "~~": ["s"]};

/** An element with attributes and children; strings become text nodes. */
function make(tag, attributes, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes ?? {})) {
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (value !== null && value !== false) element.setAttribute(name, value === true ? "" : value);
  }
  element.append(...children);
  return element;
}

/** A drawing of one line, of 20 by 20. */
function icon(line) {
  const [svg, path] = ["svg", "path"].map((tag) => document.createElementNS("http://www.w3.org/2000/svg", tag));
  svg.setAttribute("viewBox", "0 0 20 20");
  svg.setAttribute("aria-hidden", "true");
  path.setAttribute("d", line);
  svg.append(path);
  return svg;
}

/** Draw `source` into `element`. Blocks that did not change since the last call keep their nodes,
 * so that a selection in them survives. `marks[i]` makes the node that CALL_MARK i stands for. */
function drawMarkdown(element, source, marks = []) {
  const blocks = parseBlocks(source.split("\n"), 0);
  const before = element.drawn ?? [];
  let same = 0;
  while (same < blocks.length && same < before.length && blocks[same].raw === before[same]) same += 1;
  while (element.childNodes.length > same) element.lastChild.remove();
  for (const block of blocks.slice(same)) element.append(block.build(marks));
  element.drawn = blocks.map((block) => block.raw);
}

/** The blocks of some lines: {raw, build(marks)}. */
function parseBlocks(lines, depth) {
  const blocks = [];
  for (let i = 0; i < lines.length;) {
    if (!lines[i].trim()) { i += 1; continue; }
    const [end, build] = parseBlock(lines, i, depth);
    blocks.push({raw: lines.slice(i, end).join("\n"), build});
    i = end;
  }
  return blocks;
}

/** [the line after the block that starts at line i, what builds it]. */
function parseBlock(lines, i, depth) {
  const line = lines[i];
  const fence = /^ {0,3}(`{3,}|~{3,}(?!~))([^`]*)$/.exec(line);
  if (fence) return parseFence(lines, i, fence[1], fence[2].trim());
  const heading = /^ {0,3}(#{1,6})[ \t]+(\S.*)$/.exec(line);
  if (heading) {
    const text = heading[2].trimEnd().replace(/ #{1,6}$/, "");
    // The page has headings of its own above these.
    return [i + 1, (marks) => make("h" + Math.min(heading[1].length + 2, 6), {}, ...inline(text, marks, 0))];
  }
  if (isRule(line)) return [i + 1, () => make("hr")];
  if (depth < MAX_DEPTH) {
    if (/^ {0,3}>/.test(line)) return parseQuote(lines, i, depth);
    if (marker(line)) return parseList(lines, i, depth);
  }
  if (isTable(lines, i)) return parseTable(lines, i);
  let end = i + 1;
  while (end < lines.length && lines[end].trim() && !interrupts(lines, end, depth)) end += 1;
  const text = lines.slice(i, end).map((l) => l.trim().replace(/\\$/, "")).join("\n");
  return [end, (marks) => make("p", {}, ...inline(text, marks, 0))];
}

/** Whether line i begins another block although no empty line is before it. */
function interrupts(lines, i, depth) {
  const line = lines[i];
  if (/^ {0,3}(```|~~~|#{1,6}[ \t]+\S)/.test(line) || isRule(line) || isTable(lines, i)) return true;
  if (depth >= MAX_DEPTH) return false;
  return /^ {0,3}>/.test(line) || /^ {0,3}([-*+]|1[.)]) +\S/.test(line);
}

const isRule = (line) => /^ {0,3}([-*_])( *\1){2,} *$/.test(line);

function parseFence(lines, i, fence, language) {
  let end = i + 1;
  const closes = (line) => {
    const text = line.trim();
    return text.length >= fence.length && text === fence[0].repeat(text.length);
  };
  while (end < lines.length && !closes(lines[end])) end += 1;
  const code = lines.slice(i + 1, end).join("\n");
  return [Math.min(end + 1, lines.length), (marks) => codeBlock(unmarked(code, marks), language)];
}

function codeBlock(code, language) {
  const copy = make("button", {type: "button", class: "plain"}, "Copy");
  copy.addEventListener("click", () => copyText(code, copy));
  const name = language.split(/\s/)[0].slice(0, 30) || "code";
  return make("figure", {class: "code"},
    make("figcaption", {}, make("span", {}, name), copy),
    make("pre", {tabindex: "0", "aria-label": name}, make("code", {}, code)));
}

function parseQuote(lines, i, depth) {
  let end = i;
  while (end < lines.length && /^ {0,3}>/.test(lines[end])) end += 1;
  const inner = lines.slice(i, end).map((line) => line.replace(/^ {0,3}> ?/, ""));
  const blocks = parseBlocks(inner, depth + 1);
  return [end, (marks) => make("blockquote", {}, ...blocks.map((block) => block.build(marks)))];
}

/** {indent, kind, start, offset} of a line that begins a list item, or null. */
function marker(line) {
  const found = /^( *)([-*+]|\d{1,9}[.)])(?: +|$)/.exec(line);
  if (!found) return null;
  const kind = found[2].length === 1 ? found[2] : found[2].slice(-1);
  return {indent: found[1].length, kind, start: parseInt(found[2], 10), offset: found[0].length};
}

function parseList(lines, i, depth) {
  const first = marker(lines[i]);
  const items = [];
  let end = i;
  while (end < lines.length) {
    const item = marker(lines[end]);
    if (!item || item.kind !== first.kind || item.indent > first.indent + 1 || isRule(lines[end])) break;
    const inner = [lines[end].slice(item.offset)];
    end += 1;
    while (end < lines.length) {
      const line = lines[end], indent = line.length - line.trimStart().length;
      if (!line.trim()) {
        if (!lines[end + 1]?.trim()) break;   // two empty lines, or nothing more: it may be over
      } else if (indent <= first.indent + 1 && (marker(line) || !inner.at(-1).trim() || interrupts(lines, end, depth))) break;
      inner.push(line.slice(Math.min(indent, item.offset)));
      end += 1;
    }
    items.push(parseBlocks(inner, depth + 1));
    while (end + 1 < lines.length && !lines[end].trim() && marker(lines[end + 1])?.kind === first.kind) end += 1;
  }
  const ordered = !Number.isNaN(first.start);
  return [end, (marks) => make(ordered ? "ol" : "ul", {start: ordered && first.start !== 1 ? first.start : null},
    ...items.map((blocks) => listItem(blocks, marks)))];
}

function listItem(blocks, marks) {
  const nodes = blocks.map((block) => block.build(marks));
  if (nodes[0]?.tagName === "P") nodes.splice(0, 1, ...nodes[0].childNodes);
  return make("li", {}, ...nodes);
}

function cells(line) {
  const text = line.trim().replace(/^\|/, "");
  const parts = text.split(/(?<!\\)\|/);
  if (parts.length > 1 && !parts.at(-1).trim()) parts.pop();
  return parts.map((part) => part.trim().replaceAll("\\|", "|"));
}

function isTable(lines, i) {
  if (!lines[i].includes("|") || !/^[ |:-]+$/.test(lines[i + 1] ?? "")) return false;
  const rule = cells(lines[i + 1]);
  return rule.every((cell) => /^:?-+:?$/.test(cell)) && rule.length === cells(lines[i]).length;
}

function parseTable(lines, i) {
  const sides = cells(lines[i + 1]).map((cell) =>
    cell.endsWith(":") ? (cell.startsWith(":") ? "middle" : "right") : null);
  let end = i + 2;
  while (end < lines.length && lines[end].trim() && lines[end].includes("|")) end += 1;
  const row = (tag, line, marks) => {
    const texts = cells(line);
    return make("tr", {}, ...sides.map((side, j) => make(tag, {class: side}, ...inline(texts[j] ?? "", marks, 0))));
  };
  return [end, (marks) => make("div", {class: "table", tabindex: "0", role: "region", "aria-label": "Table"},
    make("table", {}, make("thead", {}, row("th", lines[i], marks)),
      make("tbody", {}, ...lines.slice(i + 2, end).map((line) => row("td", line, marks)))))];
}

/** The nodes of one stretch of text. */
function inline(text, marks, depth) {
  const nodes = [], hopeless = new Set();   // what is opened and never closed is searched for once
  let plain = "";
  const put = (...more) => {
    if (plain) nodes.push(document.createTextNode(plain));
    plain = "";
    nodes.push(...more);
  };
  for (let i = 0; i < text.length;) {
    const found = inlineAt(text, i, marks, depth, hopeless);
    if (found) {
      put(...found.nodes);
      i = found.end;
    } else if (text[i] === "\\" && /[!-/:-@[-`{-~]/.test(text[i + 1] ?? "")) {
      plain += text[i + 1];
      i += 2;
    } else {
      plain += text[i];
      i += 1;
    }
  }
  put();
  return nodes;
}

/** {nodes, end} of what begins at `i`, or null when that is plain text. */
function inlineAt(text, i, marks, depth, hopeless) {
  switch (text[i]) {
    case "\n": return {nodes: [make("br")], end: i + 1};
    case "\uE000": return callAt(text, i, marks);
    case "`": return codeAt(text, i, marks, hopeless);
    case "!": return text[i + 1] === "[" ? linkAt(text, i + 1, marks, depth) : null;
    case "[": return linkAt(text, i, marks, depth);
    case "h": return addressAt(text, i);
    case "*": case "_": case "~": return depth < MAX_DEPTH ? styleAt(text, i, marks, depth, hopeless) : null;
    default: return null;
  }
}

function callAt(text, i, marks) {
  CALL_MARK.lastIndex = i;
  const found = CALL_MARK.exec(text);
  return found && marks[found[1]] ? {nodes: [marks[found[1]]()], end: CALL_MARK.lastIndex} : null;
}

/** Code shows a call as its text. */
function unmarked(text, marks) {
  return text.replace(/\uE000(\d+)\uE001/g, (_, i) => marks[i]?.().textContent ?? "");
}

function runLength(text, i) {
  let end = i + 1;
  while (text[end] === text[i]) end += 1;
  return end - i;
}

/** Where the run of `size` backticks that ends a code span begins, or -1. */
function codeEnd(text, from, size) {
  for (let i = text.indexOf("`", from); i !== -1; i = text.indexOf("`", i)) {
    const length = runLength(text, i);
    if (length === size) return i;
    i += length;
  }
  return -1;
}

function codeAt(text, i, marks, hopeless) {
  const size = runLength(text, i), key = "`" + size;
  const end = hopeless.has(key) ? -1 : codeEnd(text, i + size, size);
  if (end === -1) {
    hopeless.add(key);
    return {nodes: [text.slice(i, i + size)], end: i + size};
  }
  let code = text.slice(i + size, end).replaceAll("\n", " ");
  if (code.startsWith(" ") && code.endsWith(" ") && code.trim()) code = code.slice(1, -1);
  return {nodes: [make("code", {}, unmarked(code, marks))], end: end + size};
}

/** The address as the browser reads it, if it leads to the web and nowhere else; or null. */
function safeAddress(text) {
  try {
    const url = new URL(text);
    return url.protocol === "http:" || url.protocol === "https:" ? url.href : null;
  } catch {
    return null;
  }
}

const anchor = (href, ...children) =>
  make("a", {href, target: "_blank", rel: "noopener noreferrer nofollow", title: href}, ...children);

function linkAt(text, i, marks, depth) {
  LINK.lastIndex = i;
  const found = LINK.exec(text), href = found && safeAddress(found[2]);
  // Links are not looked for inside links, nor are pictures loaded: they become links too.
  return href ? {nodes: [anchor(href, ...inline(found[1], marks, MAX_DEPTH))], end: LINK.lastIndex} : null;
}

function addressAt(text, i) {
  if (i > 0 && WORD.test(text[i - 1])) return null;
  ADDRESS.lastIndex = i;
  const found = ADDRESS.exec(text);
  if (!found) return null;
  let address = found[0].replace(/[.,;:!?'*_~\]}]+$/, "");
  if (address.endsWith(")") && !address.includes("(")) address = address.replace(/\)+[.,;:!?]*$/, "");
  const href = safeAddress(address);
  return href ? {nodes: [anchor(href, address)], end: i + address.length} : null;
}

function styleAt(text, i, marks, depth, hopeless) {
  const run = runLength(text, i), sign = text[i].repeat(Math.min(run, text[i] === "*" ? 3 : 2));
  const asText = {nodes: [text.slice(i, i + run)], end: i + run};
  const opens = !/^\s?$/.test(text[i + run] ?? "") && !(text[i] === "_" && i > 0 && WORD.test(text[i - 1]));
  if (run > 3 || !(sign in STYLES) || !opens || hopeless.has(sign)) return asText;
  const end = styleEnd(text, i + run, sign);
  if (end === -1) {
    hopeless.add(sign);
    return asText;
  }
  let nodes = inline(text.slice(i + sign.length, end), marks, depth + 1);
  for (const tag of STYLES[sign]) nodes = [make(tag, {}, ...nodes)];
  return {nodes, end: end + sign.length};
}

/** Where the sign that ends a style begins, or -1; code is passed over. */
function styleEnd(text, from, sign) {
  for (let i = from; i < text.length;) {
    if (text[i] === "\\") { i += 2; continue; }
    if (text[i] !== sign[0] && text[i] !== "`") { i += 1; continue; }
    const run = runLength(text, i);
    if (text[i] === "`") {
      const end = codeEnd(text, i + run, run);
      if (end === -1) from = text.length;   // the rest holds no code
      i = end === -1 ? i + run : end + run;
      continue;
    }
    const fits = run === sign.length || (sign[0] === "*" && run === 3);
    const closes = fits && !/\s/.test(text[i - 1]) && !(sign[0] === "_" && WORD.test(text[i + run] ?? ""));
    if (closes) return i + run - sign.length;
    i += run;
  }
  return -1;
}

/** Put `text` on the clipboard, and say so on `button`. */
async function copyText(text, button) {
  let done = true;
  try {
    await navigator.clipboard.writeText(text);
  } catch {   // no permission, or a page that did not come over https or from this machine
    const area = make("textarea", {class: "unseen"});
    area.value = text;
    document.body.append(area);
    area.select();
    done = document.execCommand("copy");
    area.remove();
    button.focus();
  }
  const label = button.dataset.label ??= button.textContent;
  button.textContent = done ? "Copied" : "Not copied";
  say(done ? "Copied." : "The browser does not allow copying.");
  setTimeout(() => { button.textContent = label; }, 1500);
}
