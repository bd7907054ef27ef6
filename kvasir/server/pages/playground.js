// The playground: chat and completion.

import { Answer } from "./answer.js";
import { base, modelCards } from "./api.js";
import { Parameters } from "./parameters.js";
import { asCurl, asPython, copy } from "./snippets.js";
import { explainTokens } from "./tokens.js";

const $ = (id) => document.getElementById(id);
const SUGGESTIONS = ["What is the capital of France?", "Write a haiku about rain.", "Explain what a cache is to a child."];
const PATHS = { chat: "v1/chat/completions", completion: "v1/completions" };

const parameters = new Parameters($("parameters"));
let messages = []; // the chat so far, in the API's format
let running = null; // the Answer being streamed
let completed = null; // the last completed prompt
let listing = null; // resolves when the list of models has arrived

// ---------------------------------------------------------------- requests

function kind() {
  return $("chat").hidden ? "completion" : "chat";
}

/** Names no model while the list has not arrived; the server then uses its own. */
function chosenModel() {
  return $("model").value ? { model: $("model").value } : {};
}

function chatBody(turns) {
  const system = parameters.get("system").trim();
  const body = { ...chosenModel(), messages: [...(system ? [{ role: "system", content: system }] : []), ...turns] };
  const wanted = parameters.alternatives();
  return { ...body, ...parameters.body("chat"), ...(wanted ? { logprobs: true, top_logprobs: wanted } : {}) };
}

function completionBody(prompt, model = chosenModel()) {
  const wanted = parameters.alternatives();
  return { ...model, prompt, ...parameters.body("completion"), ...(wanted ? { logprobs: wanted } : {}) };
}

function streamed(body) {
  return { ...body, stream: true, stream_options: { include_usage: true } };
}

/** The body of the next request, or of the last one if nothing is entered. */
function shownBody() {
  if (kind() === "completion") return completionBody($("prompt").value || completed || "Once upon a time");
  const draft = $("message").value.trim();
  const asked = messages.findLastIndex((message) => message.role === "user");
  const turns = draft ? [...messages, { role: "user", content: draft }] : messages.slice(0, asked + 1);
  return chatBody(turns.length ? turns : [{ role: "user", content: SUGGESTIONS[0] }]);
}

async function run(answer, body, onText) {
  const [found] = await runAll([[answer, body]], onText);
  return found;
}

/** Streams several answers at once; one button stops them all. */
async function runAll(pairs, onText) {
  const wrong = parameters.wrong();
  if (wrong) toast(`${wrong} is not valid JSON and is not sent.`);
  running = { stop: () => pairs.forEach(([answer]) => answer.stop()) };
  showRunning(true);
  const ask = ([answer, body]) => answer.run(PATHS[answer.kind], streamed(body), parameters.get("key"), onText);
  const found = await Promise.all(pairs.map(ask));
  running = null;
  showRunning(false);
  return found;
}

function showRunning(is) {
  $("send").hidden = $("complete").hidden = is;
  $("stop-chat").hidden = $("stop-completion").hidden = !is;
  $("clear").disabled = is;
}

// ---------------------------------------------------------------- chat

function turn(role, text) {
  const element = document.createElement("article");
  element.className = `turn ${role}`;
  const who = document.createElement("div");
  who.className = "who";
  who.textContent = role === "user" ? "You" : $("model").value.split("/").at(-1);
  const said = document.createElement("div");
  said.className = "said";
  said.textContent = text;
  const after = document.createElement("div");
  after.className = "after";
  element.append(who, said, after);
  $("transcript").append(element);
  $("welcome").hidden = true;
  return { element, said, after };
}

function button(text, act) {
  const made = document.createElement("button");
  made.type = "button";
  made.className = "quiet";
  made.textContent = text;
  made.addEventListener("click", act);
  return made;
}

/** Scrolls to the newest text unless the reader has scrolled up. */
function follow() {
  const view = $("transcript");
  if (view.scrollHeight - view.scrollTop - view.clientHeight < 120) view.scrollTop = view.scrollHeight;
}

async function ask() {
  const { element, said, after } = turn("assistant", "");
  for (const other of document.querySelectorAll(".again")) other.remove();
  said.tabIndex = 0;
  said.setAttribute("aria-label", "Answer. Use the arrow keys to move through its tokens.");
  $("transcript").scrollTop = $("transcript").scrollHeight;
  const answer = new Answer("chat", said, after);
  const found = await run(answer, chatBody(messages), follow);
  if (found) messages.push(answer.message);
  showCalls();
  const again = button("Regenerate", () => {
    if (running) return;
    if (found) messages.pop();
    showCalls();
    element.remove();
    ask();
  });
  again.classList.add("again");
  after.prepend(again, button("Copy", () => copied(answer.text)));
  follow();
}

function send(text) {
  if (running || !text.trim()) return;
  turn("user", text);
  const calls = openCalls();
  if (calls.length) messages.push(...calls.map(({ id }) => ({ role: "tool", tool_call_id: id, content: text })));
  else messages.push({ role: "user", content: text });
  $("message").value = "";
  grow($("message"));
  ask();
}

/** The calls whose result is the next message. */
function openCalls() {
  return messages.at(-1)?.tool_calls ?? [];
}

function showCalls() {
  const names = openCalls().map((call) => call.function.name);
  $("message").placeholder = names.length ? `Result of ${names.join(", ")}` : "Message the model";
}

function clear() {
  if (running) return;
  messages = [];
  showCalls();
  for (const element of document.querySelectorAll(".turn")) element.remove();
  $("welcome").hidden = false;
  $("completion-output").replaceChildren();
  $("again-completion").hidden = true;
  (kind() === "chat" ? $("message") : $("prompt")).focus();
}

function grow(area) {
  area.style.height = "auto";
  area.style.height = `${area.scrollHeight}px`;
}

// ---------------------------------------------------------------- completion

async function complete(prompt) {
  if (running || !prompt) return;
  completed = prompt;
  const against = $("against").value;
  const bodies = [completionBody(prompt), ...(against ? [completionBody(prompt, { model: against })] : [])];
  const output = $("completion-output");
  output.replaceChildren();
  output.classList.toggle("side-by-side", bodies.length > 1);
  const columns = bodies.map((body) => completionColumn(output, prompt, bodies.length > 1 ? body.model : null));
  await runAll(columns.map(({ answer }, index) => [answer, bodies[index]]));
  for (const { answer, after } of columns) after.prepend(button("Copy", () => copied(prompt + answer.text)));
  $("again-completion").hidden = false;
}

/** A place for one completion; beside another one it is headed by its model's name. */
function completionColumn(output, prompt, name) {
  const column = document.createElement("div");
  const said = document.createElement("div");
  said.className = "said";
  said.tabIndex = 0;
  const given = document.createElement("span");
  given.className = "given";
  given.textContent = prompt;
  const text = document.createElement("span");
  said.append(given, text);
  const after = document.createElement("div");
  after.className = "after";
  if (name) {
    const who = document.createElement("div");
    who.className = "who";
    who.textContent = name.split("/").at(-1);
    column.append(who);
  }
  column.append(said, after);
  output.append(column);
  return { answer: new Answer("completion", text, after), after };
}

// ---------------------------------------------------------------- page controls

let toastEnds = 0;

function toast(text) {
  $("toast").textContent = text;
  $("toast").hidden = false;
  clearTimeout(toastEnds);
  toastEnds = setTimeout(() => ($("toast").hidden = true), 1800);
}

async function copied(text) {
  await copy(text);
  toast("Copied");
}

function choose(tab) {
  for (const name of ["chat", "completion"]) {
    const chosen = name === tab;
    $(name).hidden = !chosen;
    $(`tab-${name}`).setAttribute("aria-selected", chosen);
    $(`tab-${name}`).tabIndex = chosen ? 0 : -1;
  }
  $("clear").textContent = tab === "chat" ? "New chat" : "Clear";
}

function openPanel(open) {
  $("panel").classList.toggle("open", open);
  $("open-panel").setAttribute("aria-expanded", open);
}

async function listModels() {
  try {
    const listed = await modelCards(parameters.get("key"));
    const named = ({ id, parent }) => new Option(id.split("/").at(-1) + (parent ? " (adapter)" : ""), id);
    const options = () => listed.map(named);
    $("model").replaceChildren(...options());
    $("model").disabled = $("against").hidden = listed.length < 2;
    $("against").replaceChildren(new Option("Compare with …", ""), ...options());
  } catch (error) {
    toast(error.message);
  }
}

function wire() {
  for (const text of SUGGESTIONS) $("suggestions").append(button(text, () => send(text)));
  $("chat-form").addEventListener("submit", (event) => {
    event.preventDefault();
    send($("message").value);
  });
  $("message").addEventListener("input", () => grow($("message")));
  $("message").addEventListener("keydown", (event) => {
    if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
    event.preventDefault();
    send($("message").value);
  });
  $("completion-form").addEventListener("submit", (event) => {
    event.preventDefault();
    complete($("prompt").value);
  });
  $("prompt").addEventListener("keydown", (event) => {
    if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) complete($("prompt").value);
  });
  $("again-completion").addEventListener("click", () => complete(completed));
  for (const id of ["stop-chat", "stop-completion"]) $(id).addEventListener("click", () => running?.stop());
  $("clear").addEventListener("click", clear);
  for (const name of ["chat", "completion"]) {
    const tab = $(`tab-${name}`);
    tab.addEventListener("click", () => choose(name));
    tab.addEventListener("keydown", (event) => {
      if (event.key !== "ArrowLeft" && event.key !== "ArrowRight") return;
      const other = name === "chat" ? "completion" : "chat";
      choose(other);
      $(`tab-${other}`).focus();
    });
  }
  $("open-panel").addEventListener("click", () => openPanel(!$("panel").classList.contains("open")));
  $("close-panel").addEventListener("click", () => openPanel(false));
  parameters.inputs.key.addEventListener("change", () => (listing = listModels()));
  const needsKey = () => parameters.get("key") !== "";
  $("copy-curl").addEventListener("click", async () => {
    await listing;
    copied(asCurl(new URL(PATHS[kind()], base), shownBody(), needsKey()));
  });
  $("copy-python").addEventListener("click", async () => {
    await listing;
    copied(asPython(String(new URL("v1", base)), kind(), { ...shownBody(), stream: true }, needsKey()));
  });
  document.addEventListener("keydown", (event) => {
    if (event.key === "Escape") running ? running.stop() : openPanel(false);
    const writing = ["INPUT", "TEXTAREA", "SELECT"].includes(event.target.tagName);
    if (event.key === "/" && !writing && !event.ctrlKey && !event.metaKey) {
      event.preventDefault();
      (kind() === "chat" ? $("message") : $("prompt")).focus();
    }
  });
  explainTokens($("transcript"), $("tooltip"));
  explainTokens($("completion-output"), $("tooltip"));
}

wire();
listing = listModels();
