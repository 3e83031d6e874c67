// What is said to the server and what comes back. All addresses are relative to the page's own.

/** A request that did not lead to a whole answer, in words for people. */
class Failure extends Error {
  constructor(message, {status = 0} = {}) {
    super(message);
    this.status = status;
  }
}

const LOST = "The connection was lost before the answer was complete.";
const UNREACHABLE = "The server cannot be reached. Is it still running?";

/** The events of an answer to `messages`; throws Failure, or AbortError when `signal` says so. */
async function* askServer(body, signal) {
  const headers = {"Content-Type": "application/json"};
  let response;
  try {
    response = await fetch("chat/completions", {method: "POST", headers, body: JSON.stringify(body), signal});
  } catch (error) {
    throw error.name === "AbortError" ? error : new Failure(UNREACHABLE);
  }
  if (!response.ok) throw await refusal(response);
  let done = false;
  try {
    for await (const event of readEvents(response.body)) {
      if (event.error !== undefined) throw new Failure(sentence(String(event.error)));
      if (event.done) done = true;
      yield event;
    }
  } catch (error) {
    if (error.name === "AbortError" || error instanceof Failure) throw error;
    if (!done) throw new Failure(LOST);
  }
  if (!done) throw new Failure(LOST);
}

/** The JSON of each server-sent event. A chunk may end anywhere, also inside a letter. */
async function* readEvents(body) {
  const reader = body.getReader(), decoder = new TextDecoder();
  let rest = "", data = [];
  try {
    for (;;) {
      const {done, value} = await reader.read();
      rest += done ? decoder.decode() + "\n\n" : decoder.decode(value, {stream: true});
      const lines = rest.split("\n");
      rest = lines.pop();
      for (const line of lines.map((l) => l.replace(/\r$/, ""))) {
        if (line.startsWith("data:")) data.push(line.slice(line[5] === " " ? 6 : 5));
        if (line || !data.length) continue;   // comments and other fields mean nothing here
        const text = data.join("\n");
        data = [];
        if (text === "[DONE]") continue;
        try {
          yield JSON.parse(text);
        } catch {
          throw new Failure(done ? LOST : "The server sent something that this page cannot read.");
        }
      }
      if (done) return;
    }
  } finally {
    reader.cancel().catch(() => {});   // whoever stops listening frees the model
  }
}

/** What a status that is not 200 means. */
async function refusal(response) {
  let detail = "";
  try {
    const tree = await response.json();
    detail = [tree.detail, tree.error?.message, tree.error].find((text) => typeof text === "string") ?? "";
  } catch {
    // A proxy's page in HTML: the status has to say it.
  }
  const {status} = response, wait = Number(response.headers.get("Retry-After"));
  if (status === 503 || status === 429) {
    return new Failure(`The server is busy. Try again ${wait > 0 ? `in ${wait} seconds` : "in a moment"}.`, {status});
  }
  if (status === 401 || status === 403) return new Failure("The server asks for its API key: load the page again to give it.", {status});
  if (detail) return new Failure(sentence(detail), {status});
  return new Failure(status >= 500 ? `The server failed (status ${status}).` : `The server refused this (status ${status}).`, {status});
}

/** {model, parameters, context, defaults, limits}, as far as the server tells. */
async function readStats() {
  for (const path of ["stats", "health"]) {
    try {
      const response = await fetch(path);
      if (response.ok) return await response.json();
    } catch {
      // Not there, or no JSON: the page works without.
    }
  }
  return {};
}

function sentence(text) {
  const whole = text.charAt(0).toUpperCase() + text.slice(1);
  return /[.!?]$/.test(whole) ? whole : whole + ".";
}
