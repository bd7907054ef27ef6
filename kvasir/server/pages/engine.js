// The engine view: reads the feed and draws it. docs/engine_view.md describes the feed.

import { base, get, storedKey } from "./api.js";
import { BlockGrid, findHolders, numbers } from "./blocks.js";
import { drawDistribution, drawLedger, drawTimeline } from "./charts.js";
import { forgetColours } from "./colours.js";
import { shareAPrompt } from "./demo.js";
import { RequestList } from "./requests.js";

const $ = (id) => document.getElementById(id);
const WINDOW = 5; // seconds over which rates are averaged
const MOST_STEPS = 600;
const NO_KEY = 4001; // close code of a WebSocket without an API key

let state = null; // the last message of the feed
let steps = [];
let lit = null; // under the pointer: {key} or {block}
let queued = false;
let engine = 0; // index of the engine shown
let socket = null;

const grid = new BlockGrid($("blocks"));
const list = new RequestList($("requests"), point);

// ---------------------------------------------------------------- the feed

function take(next) {
  const last = steps.at(-1)?.step ?? 0;
  if (next.engine !== engine) return; // a late message of the engine shown before
  if (state && next.totals.steps < state.totals.steps) steps = []; // the server was restarted
  steps = [...steps, ...next.steps.filter((step) => step.step > last)].slice(-MOST_STEPS);
  state = next;
  offerEngines(next.engines);
  redraw();
}

/** Uses a WebSocket. With an API key it polls, because browsers cannot send headers with a WebSocket. */
function follow() {
  if (storedKey()) ask();
  else listen();
}

async function ask() {
  try {
    take(await get(`engine/state?engine=${engine}&since=${steps.at(-1)?.step ?? 0}`, storedKey()));
    connected("live", true);
    setTimeout(follow, 250);
  } catch (error) {
    connected(error.message);
    setTimeout(follow, 1500);
  }
}

function listen() {
  const url = new URL("engine/feed", base);
  url.protocol = url.protocol.replace("http", "ws");
  url.searchParams.set("engine", engine);
  socket = new WebSocket(url);
  socket.addEventListener("message", (event) => {
    connected("live", true);
    take(JSON.parse(event.data));
  });
  socket.addEventListener("close", (event) => {
    const why = event.code === NO_KEY ? "enter the API key in the playground" : event.reason || "disconnected, retrying";
    connected(why);
    setTimeout(follow, 1500);
  });
}

function connected(words, live = false) {
  $("connection").textContent = words;
  $("connection").classList.toggle("live", live);
}

function offerEngines(count) {
  if ($("engine").options.length === count) return;
  $("engine").replaceChildren(...Array.from({ length: count }, (_, i) => new Option(`engine ${i}`, i)));
  $("engine").value = engine;
  $("engine").hidden = count < 2;
}

// ---------------------------------------------------------------- drawing

function redraw() {
  if (queued || !state) return;
  queued = true;
  requestAnimationFrame(() => {
    queued = false;
    draw();
  });
}

function draw() {
  const { blocks, requests, totals } = state;
  const holders = findHolders(requests);
  const cached = new Set(numbers(blocks.cached_runs));
  forgetColours(new Set(requests.map((request) => request.key)));
  grid.lit = lit;
  const more = grid.draw(blocks, holders, cached);
  $("more").textContent = more ? `and ${more.toLocaleString("en")} more free blocks` : "";
  list.draw(requests, holders, lit);
  $("idle").hidden = requests.length > 0;
  drawTimeline($("timeline"), steps);
  for (const name of ["ttft", "itl"]) {
    $(`${name}-words`).textContent = drawDistribution($(name), state.latency[name], name === "ttft" ? "--prompt" : "--decode");
  }
  drawLedger($("ledger-bar"), $("ledger"), state.memory, blocks, totals);
  figures(blocks, totals, holders);
}

function figures(blocks, totals, holders) {
  const recent = steps.filter((step) => step.time > state.time - WINDOW);
  const rate = (name) => recent.reduce((sum, step) => sum + step[name], 0) / WINDOW;
  const shared = [...holders.values()].filter((keys) => keys.length > 1);
  const saved = shared.reduce((sum, keys) => sum + keys.length - 1, 0);
  const words = {
    "output-rate": rounded(rate("sampled")),
    "prompt-rate": rounded(rate("prompt_tokens")),
    running: totals.num_running,
    waiting: `${totals.num_waiting} waiting`,
    "cache-use": blocks.total ? `${rounded((100 * blocks.used) / blocks.total)} %` : "–",
    "cache-blocks": blocks.total
      ? `${blocks.used.toLocaleString("en")} of ${blocks.total.toLocaleString("en")} blocks`
      : "this model has no KV cache",
    shared: shared.length,
    saved: saved ? `save ${saved} blocks` : "stored once for several requests",
    "hit-rate": totals.prefix_cache_queries ? `${rounded((100 * totals.prefix_cache_hits) / totals.prefix_cache_queries)} %` : "–",
    preemptions: totals.preemptions,
    "block-size": blocks.size,
  };
  for (const [id, text] of Object.entries(words)) $(id).textContent = text;
  $("blocks").dataset.shared = shared.length; // read by tests
}

function rounded(value) {
  return value && value < 10 ? value.toFixed(1) : Math.round(value).toLocaleString("en");
}

// ---------------------------------------------------------------- pointing

function point(at) {
  lit = at;
  redraw();
}

function describe(block) {
  const keys = findHolders(state.requests).get(block) ?? [];
  const names = state.requests.filter((request) => keys.includes(request.key)).map((request) => request.id);
  if (names.length > 1) return `Block ${block}, shared by ${names.length} requests:\n${names.slice(0, 8).join("\n")}`;
  if (names.length) return `Block ${block} of ${names[0]}`;
  const kept = new Set(numbers(state.blocks.cached_runs)).has(block);
  return kept ? `Block ${block}: free, content cached` : `Block ${block}: free`;
}

$("blocks").addEventListener("pointermove", (event) => {
  const block = state ? grid.at(event) : null;
  $("tooltip").hidden = block === null;
  point(block === null ? null : { block });
  if (block === null) return;
  $("tooltip").textContent = describe(block);
  $("tooltip").style.left = `${Math.min(event.clientX + 14, innerWidth - $("tooltip").offsetWidth - 8)}px`;
  $("tooltip").style.top = `${event.clientY + 16}px`;
});
$("blocks").addEventListener("pointerleave", () => {
  $("tooltip").hidden = true;
  point(null);
});
$("whole").addEventListener("change", () => {
  grid.whole = $("whole").checked;
  redraw();
});
$("demo").addEventListener("click", async () => {
  $("demo").disabled = true;
  await shareAPrompt();
  $("demo").disabled = false;
});
$("engine").addEventListener("change", () => {
  engine = Number($("engine").value);
  steps = [];
  state = null;
  socket?.close(); // the next connection asks for the chosen engine
});
window.addEventListener("resize", redraw);
document.addEventListener("themechange", redraw);

follow();
