// The list of requests: id, progress, and blocks in the order of the text.

import { drawBlock, numbers } from "./blocks.js";
import { colourOf, paper, themed } from "./colours.js";

const MAX_LINES = 60; // requests drawn

function element(kind, name, text = "") {
  const made = document.createElement(kind);
  made.className = name;
  made.textContent = text;
  return made;
}

class Line {
  constructor(request, onPoint) {
    this.element = document.createElement("li");
    this.dot = element("i", "dot");
    this.words = element("span", "words");
    const name = element("div", "name");
    name.append(this.dot, element("span", "id", request.id), this.words);
    this.canvas = document.createElement("canvas");
    this.bar = document.createElement("i");
    const progress = element("div", "progress");
    progress.append(this.bar);
    this.element.append(name, this.canvas, progress);
    this.element.addEventListener("pointerenter", () => onPoint({ key: request.key }));
    this.element.addEventListener("pointerleave", () => onPoint(null));
    this.dot.style.background = colourOf(request.key);
  }

  update(request, holders, lit) {
    const waits = request.state === "waiting";
    this.element.classList.toggle("waiting", waits);
    this.element.classList.toggle("lit", lit !== null && (lit.key === request.key || this.#holds(request, lit.block)));
    this.words.textContent = words(request);
    this.canvas.hidden = waits;
    const done = request.computed_tokens + (request.output_tokens ? 1 : 0);
    this.bar.style.width = `${Math.min(100, (100 * done) / (request.prompt_tokens + request.max_tokens))}%`;
    this.bar.style.background = waits ? themed("--muted") : colourOf(request.key);
    if (!waits) this.#draw(request, holders, lit);
  }

  #holds(request, block) {
    return request.blocks.some(([first, count]) => block >= first && block < first + count);
  }

  #draw(request, holders, lit) {
    const { context, width, height } = paper(this.canvas);
    const count = request.blocks.reduce((sum, run) => sum + run[1], 0);
    const size = Math.min(height, width / Math.max(1, count));
    let x = 0;
    for (const block of numbers(request.blocks)) {
      const keys = holders.get(block) ?? [request.key];
      const own = [request.key, ...keys.filter((key) => key !== request.key)].map((key) => colourOf(key));
      drawBlock(context, x, (height - size) / 2, size, own, "", lit?.block !== undefined && lit.block !== block);
      x += size;
    }
  }
}

function words(request) {
  const preempted = request.preemptions ? ` · preempted ${request.preemptions}×` : "";
  if (request.state === "waiting") return `waiting · prompt ${request.prompt_tokens}${preempted}`;
  const cached = request.cached_tokens ? ` (${request.cached_tokens} cached)` : "";
  const prompt = Math.min(request.computed_tokens, request.prompt_tokens);
  const read = prompt < request.prompt_tokens ? `${prompt} of ${request.prompt_tokens}` : request.prompt_tokens;
  return `prompt ${read}${cached} · output ${request.output_tokens}/${request.max_tokens}${preempted}`;
}

export class RequestList {
  constructor(list, onPoint) {
    this.list = list;
    this.onPoint = onPoint;
    this.lines = new Map(); // by key
  }

  draw(requests, holders, lit) {
    const shown = requests.slice(0, MAX_LINES);
    const present = new Set(shown.map((request) => request.key));
    for (const [key, line] of this.lines) {
      if (present.has(key)) continue;
      line.element.remove();
      this.lines.delete(key);
    }
    shown.forEach((request, place) => {
      let line = this.lines.get(request.key);
      if (!line) {
        line = new Line(request, this.onPoint);
        this.lines.set(request.key, line);
      }
      if (this.list.children[place] !== line.element) this.list.insertBefore(line.element, this.list.children[place] ?? null);
      line.update(request, holders, lit);
    });
  }
}
