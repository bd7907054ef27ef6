// The API page: shows openapi.json. Everything is set as text, never as HTML.

import { base, get, keepKey, models, storedKey } from "./api.js";
import { endpoints } from "./openapi.js";
import { asCurl, copy } from "./snippets.js";

const $ = (id) => document.getElementById(id);
let needsKey = false;

// ---------------------------------------------------------------- parts

function make(kind, className, ...inside) {
  const made = document.createElement(kind);
  if (className) made.className = className;
  made.append(...inside);
  return made;
}

/** Splits text at `backticks`, which mark code. */
function prose(text) {
  return text.split("`").map((part, i) => (i % 2 ? make("code", "", part) : part));
}

function field(given) {
  const item = make("li", "", make("span", "name", given.name), make("span", "type", given.type));
  item.dataset.name = given.name.toLowerCase();
  if (given.place) item.append(make("span", "type", `in the ${given.place}`));
  if (given.required) item.append(make("span", "required", "required"));
  if (given.default !== null) item.append(make("span", "default", "default ", make("code", "", given.default)));
  if (given.description) item.append(make("p", "", ...prose(given.description)));
  if (given.fields.length) item.append(more(`Fields of ${given.name}`, fieldList(given.fields)));
  return item;
}

function fieldList(given) {
  return make("ul", "fields", ...given.map(field));
}

function more(title, ...inside) {
  return make("details", "more", make("summary", "", title), ...inside);
}

function fieldsWithRefused(given) {
  const refused = given.filter((each) => each.isRefused);
  const made = [fieldList(given.filter((each) => !each.isRefused))];
  if (refused.length) made.push(more(`Not supported: ${refused.length} fields`, fieldList(refused)));
  return made;
}

function example(endpoint) {
  const path = endpoint.path.slice(1).replaceAll(/\{(\w+)\}/g, (_, name) => name.toUpperCase());
  const text = asCurl(new URL(path, base).href, endpoint.body?.example, needsKey, endpoint.method);
  const button = make("button", "", "Copy");
  button.setAttribute("aria-label", `Copy the example of ${endpoint.method} ${endpoint.path}`);
  button.addEventListener("click", () => copy(text).then(() => toast("Copied")));
  const shown = make("pre", "", text);
  shown.tabIndex = 0; // so that the keyboard can scroll it
  return make("div", "example", shown, button);
}

function inside(endpoint) {
  const made = make("div", "inside");
  const part = (title, ...content) => made.append(make("h3", "", title), ...content);
  if (endpoint.description) made.append(make("p", "", ...prose(endpoint.description)));
  part("Example", example(endpoint));
  if (endpoint.parameters.length) part("Parameters", fieldList(endpoint.parameters));
  if (endpoint.body?.fields.length) part("Body", ...fieldsWithRefused(endpoint.body.fields));
  if (endpoint.reply.length) part("Reply", more("Fields of the reply", fieldList(endpoint.reply)));
  const lines = endpoint.answers.map(({ status, description }) =>
    make("li", "", make("span", "name", status), ...prose(description)));
  made.append(more("Status codes", make("ul", "fields", ...lines)));
  return made;
}

function block(endpoint) {
  const summary = make(
    "summary", "",
    make("span", `method ${endpoint.method.toLowerCase()}`, endpoint.method),
    make("span", "path", endpoint.path),
    make("span", "words", ...prose(endpoint.summary)),
  );
  const made = make("details", "endpoint", summary, inside(endpoint));
  made.id = endpoint.id;
  made.dataset.words = `${endpoint.method} ${endpoint.path} ${endpoint.summary} ${endpoint.description}`.toLowerCase();
  return made;
}

function draw(found) {
  $("endpoints").replaceChildren(
    ...[...grouped(found)].map(([tag, each]) => make("section", "group", make("h2", "", tag), ...each.map(block))),
  );
  find();
  openNamed();
}

function grouped(found) {
  const groups = new Map();
  for (const each of found) groups.set(each.tag, [...(groups.get(each.tag) ?? []), each]);
  return groups;
}

// ---------------------------------------------------------------- finding

/** Shows matching endpoints whole; of other endpoints, only the fields whose names match. */
function find() {
  const asked = $("find").value.trim().toLowerCase();
  for (const each of document.querySelectorAll(".endpoint")) {
    const isWhole = !asked || each.dataset.words.includes(asked);
    let fits = 0;
    for (const item of each.querySelectorAll("li[data-name]")) {
      const isShown = isWhole || [item, ...item.querySelectorAll("li[data-name]")].some((each) => each.dataset.name.includes(asked));
      item.hidden = !isShown;
      fits += isShown && !isWhole;
    }
    each.hidden = !isWhole && !fits;
    if (fits) for (const closed of [each, ...each.querySelectorAll("details")]) closed.open = holdsFit(closed);
  }
  for (const group of document.querySelectorAll(".group")) group.hidden = !group.querySelector(".endpoint:not([hidden])");
  $("status").textContent = document.querySelector(".endpoint") && !document.querySelector(".endpoint:not([hidden])")
    ? "No endpoint or field matches." : "";
}

function holdsFit(details) {
  return Boolean(details.querySelector("li[data-name]:not([hidden])"));
}

function openNamed() {
  const named = document.getElementById(decodeURIComponent(location.hash.slice(1)));
  if (!named?.classList.contains("endpoint")) return;
  named.open = true;
  named.scrollIntoView();
}

function toggleAll() {
  const open = $("toggle-all").getAttribute("aria-pressed") !== "true";
  $("toggle-all").setAttribute("aria-pressed", String(open));
  $("toggle-all").textContent = open ? "Close all" : "Open all";
  for (const each of document.querySelectorAll(".endpoint")) each.open = open;
}

// ---------------------------------------------------------------- reading

let toastEnds = 0;

function toast(text) {
  $("toast").textContent = text;
  $("toast").hidden = false;
  clearTimeout(toastEnds);
  toastEnds = setTimeout(() => ($("toast").hidden = true), 1800);
}

/** Puts the name of a served model into examples that need one. */
async function nameModel(found) {
  const named = found.filter((each) => each.body && "model" in each.body.example);
  const [first] = await models(storedKey()).catch(() => []);
  if (first) for (const each of named) each.body.example.model = first;
}

async function read() {
  $("status").className = "";
  try {
    const spec = await get("openapi.json", storedKey());
    needsKey = Boolean(storedKey());
    $("about").textContent = spec.info?.description ?? "";
    $("version").textContent = `Version ${spec.info?.version ?? "unknown"}.`;
    const found = endpoints(spec);
    await nameModel(found);
    draw(found);
    $("key-form").hidden = true;
  } catch (error) {
    $("status").textContent = error.message;
    $("status").className = "wrong";
    $("key-form").hidden = error.status !== 401;
  }
}

$("find").addEventListener("input", find);
$("toggle-all").addEventListener("click", toggleAll);
$("find-form").addEventListener("submit", (event) => event.preventDefault());
$("key-form").addEventListener("submit", (event) => {
  event.preventDefault();
  keepKey($("key").value.trim());
  read();
});
document.addEventListener("keydown", (event) => {
  if (event.key !== "/" || event.target.matches("input, textarea")) return;
  event.preventDefault();
  $("find").focus();
});
window.addEventListener("hashchange", openNamed);
$("endpoints").addEventListener("click", (event) => {
  const opened = event.target.closest(".endpoint > summary")?.parentElement;
  if (opened && !opened.open) history.replaceState(null, "", `#${opened.id}`); // so that the address links to this endpoint
});
read();
