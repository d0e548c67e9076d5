"use strict";
// A chat over /v1/chat/completions. All text is put in as text, never as HTML.

const byId = (id) => document.getElementById(id);
const messages = byId("messages");
let history = []; // what the model is sent: {role, content}
let running = null; // the AbortController of the answer under way

function headers() {
  const key = byId("key").value;
  const common = { "Content-Type": "application/json" };
  return key ? { ...common, Authorization: `Bearer ${key}` } : common;
}

function show(kind, text) {
  byId("hint").hidden = true;
  const box = document.createElement("div");
  box.className = `message ${kind}`;
  box.append(document.createTextNode(text));
  messages.append(box);
  messages.scrollTop = messages.scrollHeight;
  return box;
}

function note(box, text) {
  const line = document.createElement("span");
  line.className = "note";
  line.textContent = text;
  box.append(line);
}

async function problem(response) {
  try {
    return (await response.json()).error.message;
  } catch {
    return `the server answered ${response.status}`;
  }
}

// Server-sent events of a response, as parsed JSON.
async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let pending = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    pending += value;
    let end;
    while ((end = pending.indexOf("\n\n")) >= 0) {
      const event = pending.slice(0, end);
      pending = pending.slice(end + 2);
      if (event === "data: [DONE]") return;
      if (event.startsWith("data: ")) yield JSON.parse(event.slice(6));
    }
  }
}

function figures(started, first, usage, tokens) {
  const seconds = (performance.now() - first) / 1000;
  const count = usage ? usage.completion_tokens : tokens;
  const rate = count > 1 && seconds > 0 ? ((count - 1) / seconds).toFixed(1) : "–";
  let line = `${count} tokens · ${rate} tokens/s · first after ${Math.round(first - started)} ms`;
  if (usage) {
    const cached = usage.prompt_tokens_details.cached_tokens;
    line += ` · ${cached} of ${usage.prompt_tokens} prompt tokens cached`;
  }
  return line;
}

async function answer() {
  const system = byId("system").value.trim();
  const asked = system ? [{ role: "system", content: system }, ...history] : history;
  const box = show("assistant", "");
  const text = box.firstChild;
  const started = performance.now();
  let first = null, usage = null, tokens = 0, reason = null;
  running = new AbortController();
  try {
    const response = await fetch("/v1/chat/completions", {
      method: "POST",
      headers: headers(),
      signal: running.signal,
      body: JSON.stringify({
        messages: asked,
        stream: true,
        stream_options: { include_usage: true },
        temperature: Number(byId("temperature").value),
        max_tokens: Number(byId("max-tokens").value),
      }),
    });
    if (!response.ok) {
      if (response.status === 401) byId("settings").open = true;
      throw new Error(await problem(response));
    }
    for await (const event of events(response)) {
      if (event.error) throw new Error(event.error.message);
      if (event.usage) usage = event.usage;
      for (const choice of event.choices) {
        first ??= performance.now();
        tokens += 1;
        text.data += choice.delta.content ?? "";
        reason = choice.finish_reason ?? reason;
      }
      if (first !== null) byId("status").textContent = figures(started, first, usage, tokens);
      messages.scrollTop = messages.scrollHeight;
    }
    if (reason === "length") note(box, "cut at the length limit");
  } catch (error) {
    if (error.name === "AbortError") {
      note(box, "stopped");
    } else {
      if (text.data === "") box.remove();
      show("error", error.message);
    }
  } finally {
    running = null;
  }
  if (text.data !== "") history.push({ role: "assistant", content: text.data });
  else history.pop(); // a question without an answer is not part of the conversation
}

function busy(is) {
  byId("send").hidden = is;
  byId("stop").hidden = !is;
}

byId("ask").addEventListener("submit", async (event) => {
  event.preventDefault();
  const text = byId("text").value.trim();
  if (!text || running) return;
  byId("text").value = "";
  history.push({ role: "user", content: text });
  show("user", text);
  busy(true);
  await answer();
  busy(false);
  byId("text").focus();
});

byId("text").addEventListener("keydown", (event) => {
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
    event.preventDefault();
    byId("ask").requestSubmit();
  }
});

byId("stop").addEventListener("click", () => running?.abort());

byId("reset").addEventListener("click", () => {
  running?.abort();
  history = [];
  for (const box of messages.querySelectorAll(".message")) box.remove();
  byId("hint").hidden = false;
  byId("status").textContent = "";
});

// While the model loads the server answers 503: ask again until it says which model it has.
async function findModel() {
  try {
    const response = await fetch("/v1/models", { headers: headers() });
    if (response.ok) {
      const card = (await response.json()).data[0];
      byId("model").textContent = card.id;
      const field = byId("temperature");
      if (field.value === field.defaultValue) field.value = card.sampling_defaults.temperature ?? field.value;
      return;
    }
    byId("model").textContent = response.status === 401 ? "needs an API key (see Settings)" : "loading…";
    if (response.status === 401) return;
  } catch {
    byId("model").textContent = "the server does not answer";
  }
  setTimeout(findModel, 1000);
}

byId("key").addEventListener("change", findModel);
findModel();
