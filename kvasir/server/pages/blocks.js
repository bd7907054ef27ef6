// The picture of the KV cache: one square per block, in the colour of the request that holds it.

import { colourOf, paper, themed } from "./colours.js";

const LARGEST = 24; // largest side of a square, in pixels
const STEP = 200; // the picture grows by this many blocks at a time, so that it does not flicker

/** Expands [[first, count], ...]. */
export function* numbers(runs) {
  for (const [first, count] of runs) for (let i = 0; i < count; i++) yield first + i;
}

/** A Map from block number to the keys of the requests that hold it. */
export function findHolders(requests) {
  const holders = new Map();
  for (const request of requests) {
    for (const block of numbers(request.blocks)) {
      const found = holders.get(block);
      if (found) found.push(request.key);
      else holders.set(block, [request.key]);
    }
  }
  return holders;
}

/** Draws one square. `colours` are those of its holders; a free block has none and is drawn in `ground`. */
export function drawBlock(context, x, y, size, colours, ground, faded = false) {
  const inset = size > 5 ? 1 : size > 2 ? 0.5 : 0;
  const side = size - inset;
  context.globalAlpha = faded ? 0.22 : 1;
  context.fillStyle = colours.length ? colours[0] : ground;
  context.fillRect(x, y, side, side);
  if (colours.length > 1) {
    context.fillStyle = colours[1];
    context.beginPath();
    context.moveTo(x + side, y);
    context.lineTo(x + side, y + side);
    context.lineTo(x, y + side);
    context.fill();
    if (side >= 6) {
      context.strokeStyle = themed("--ink");
      context.lineWidth = 1.5;
      context.strokeRect(x + 0.75, y + 0.75, side - 1.5, side - 1.5);
    }
    if (side >= 16) {
      context.fillStyle = "#fff";
      context.font = `600 ${Math.round(side * 0.5)}px system-ui, sans-serif`;
      context.textAlign = "center";
      context.textBaseline = "middle";
      context.fillText(String(colours.length), x + side / 2, y + side / 2 + 0.5);
    }
  }
  context.globalAlpha = 1;
}

export class BlockGrid {
  constructor(canvas) {
    this.canvas = canvas;
    this.whole = false;
    this.lit = null; // under the pointer: {key} of a request or {block} number
  }

  /** Draws the blocks. Returns the number of free blocks at the end that are not shown. */
  draw(blocks, holders, cached) {
    const { context, width, height } = paper(this.canvas);
    const fits = Math.floor(width / LARGEST) * Math.floor(height / LARGEST);
    this.shown = Math.min(blocks.total, this.whole ? blocks.total : Math.max(fits, this.#needed(holders, cached)));
    this.size = Math.max(1, Math.min(LARGEST, Math.sqrt((width * height) / this.shown)));
    if (this.size > 4) this.size = Math.floor(this.size);
    while (this.size > 1 && Math.ceil(this.shown / Math.floor(width / this.size)) * this.size > height) this.size -= 0.5;
    this.columns = Math.max(1, Math.floor(width / this.size));
    const [kept, free] = [themed("--cached"), themed("--free")];
    for (let block = 1; block <= this.shown; block++) {
      const keys = holders.get(block) ?? [];
      const faded = this.lit !== null && !(keys.includes(this.lit.key) || this.lit.block === block);
      const [x, y] = this.#place(block);
      drawBlock(context, x, y, this.size, keys.map((key) => colourOf(key)), cached.has(block) ? kept : free, faded);
    }
    return blocks.total - this.shown;
  }

  /** The number of blocks up to the last one that is used or cached. */
  #needed(holders, cached) {
    let last = 0;
    for (const block of holders.keys()) last = Math.max(last, block);
    for (const block of cached) last = Math.max(last, block);
    return Math.ceil(last / STEP) * STEP;
  }

  #place(block) {
    return [((block - 1) % this.columns) * this.size, Math.floor((block - 1) / this.columns) * this.size];
  }

  /** The block under a pointer event, or null. */
  at(event) {
    const column = Math.floor(event.offsetX / this.size);
    const block = Math.floor(event.offsetY / this.size) * this.columns + column + 1;
    return column < this.columns && block >= 1 && block <= this.shown ? block : null;
  }
}
