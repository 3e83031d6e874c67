// How answers are drawn, what the page looks like, and the commands that begin with a slash.

const SETTINGS = "nanochat.settings";
const NUMBERS = {
  temperature: {label: "temperature", command: "temperature", low: 0, high: 2, whole: false, first: 0.6},
  top_k: {label: "top k", command: "topk", low: 0, high: 200, whole: true, first: 50},
  max_tokens: {label: "max tokens", command: "maxtokens", low: 1, high: 4096, whole: true, first: 512},
  seed: {label: "seed", command: "seed", low: 0, high: 2 ** 31 - 1, whole: true, first: null},
};
// Of the server; its /stats may say others.
const limits = {message: 8000, total: 32000, messages: 500};
const chosen = readSettings();   // only what a person changed

function readSettings() {
  try {
    const tree = JSON.parse(localStorage.getItem(SETTINGS)) ?? {}, kept = {};
    for (const name of Object.keys(NUMBERS)) if (problemWith(name, tree[name]) === null) kept[name] = tree[name];
    if (["auto", "light", "dark"].includes(tree.theme)) kept.theme = tree.theme;
    if (typeof tree.sidebar === "boolean") kept.sidebar = tree.sidebar;
    return kept;
  } catch {
    return {};
  }
}

function changeSetting(name, value) {
  if (value === null || value === undefined) delete chosen[name];
  else chosen[name] = value;
  try {
    localStorage.setItem(SETTINGS, JSON.stringify(chosen));
  } catch {
    // They last as long as the page.
  }
}

const setting = (name) => chosen[name] ?? NUMBERS[name].first;

/** What of a request the settings decide. */
function sampling() {
  const values = {};
  for (const name of Object.keys(NUMBERS)) if (setting(name) !== null) values[name] = setting(name);
  return values;
}

/** Why a value cannot be, in words; null when it can. */
function problemWith(name, value) {
  const {label, low, high, whole} = NUMBERS[name];
  const ok = typeof value === "number" && value >= low && value <= high && (!whole || Number.isInteger(value));
  return ok ? null : `${label} is a ${whole ? "whole number" : "number"} from ${low} to ${high}`;
}

/** Take over what the server says about itself. */
function takeDefaults(stats) {
  for (const [name, number] of Object.entries(NUMBERS)) {
    const value = stats.defaults?.[name];
    if (problemWith(name, value) === null) number.first = value;
  }
  const most = (name) => stats.limits?.[name]?.[1] > 0 ? stats.limits[name][1] : undefined;
  limits.message = most("message_characters") ?? limits.message;
  limits.total = most("total_characters") ?? limits.total;
  limits.messages = most("messages") ?? limits.messages;
  for (const [name, number] of Object.entries(NUMBERS)) number.high = most(name) ?? number.high;
}

function applyTheme() {
  const theme = chosen.theme ?? "auto";
  if (theme === "auto") delete document.documentElement.dataset.theme;
  else document.documentElement.dataset.theme = theme;
}

const COMMANDS = [
  ...Object.entries(NUMBERS).map(([name, {label, command, low, high}]) => ({
    name: command,
    takes: name === "seed" ? "N or random" : "N",
    says: name === "seed" ? "the same seed gives the same answer" : `${label}, ${low} to ${high}; without N, shows it`,
    run: (value) => numberCommand(name, value),
  })),
  {name: "clear", takes: "", says: "begin a new chat; this one stays in the list", run: () => { openNew(); return ""; }},
  {name: "help", takes: "", says: "this list", run: () => keyList(commandPairs())},
];

/** A list of what can be typed or pressed, each with what it does. */
const keyList = (pairs) => make("dl", {class: "keys"}, ...pairs.flatMap(([key, does]) => [make("dt", {}, key), make("dd", {}, does)]));

const commandPairs = () => [
  ...COMMANDS.map(({name, takes, says}) => [`/${name} ${takes}`.trim(), says]),
  ["//", "a message that begins with a slash"],
];

function numberCommand(name, value) {
  const {label} = NUMBERS[name];
  if (value !== "") {
    const random = name === "seed" && /^(random|off|none)$/i.test(value);
    const number = random ? null : Number(value), problem = random ? null : problemWith(name, number);
    if (problem) throw new Failure(`'${value}' is not possible: ${problem}.`);
    changeSetting(name, number);
  }
  return `${label} ${setting(name) ?? "random"}`;
}

/** Do what a line says that begins with a slash; returns what to show, text or an element. Throws Failure. */
function runCommand(line) {
  const [, name, value] = /^\/(\S*)\s*([^]*)$/.exec(line);
  const command = COMMANDS.find((one) => one.name === name.toLowerCase());
  if (!command) throw new Failure(`There is no command '/${name}'; /help lists them. Two slashes send it as a message.`);
  if (value && !command.takes) throw new Failure(`/${name} takes nothing.`);
  return command.run(value.trim());
}

/** The commands that a half typed line may become. */
const matchingCommands = (line) =>
  /^\/[a-z]*$/i.test(line) ? COMMANDS.filter(({name}) => name.startsWith(line.slice(1).toLowerCase())) : [];
