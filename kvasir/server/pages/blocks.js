// The picture of the cache: every block a square, coloured by who holds it.

import { colourOf, paper, themed } from "./colours.js";

const LARGEST = 24; // pixels a square may have
const STEP = 200; // blocks by which the picture grows, so that it is calm

/** Expands [[first, count], ...]. */
export function* numbers(runs) {
  for (const [first, count] of runs) for (let i = 0; i < count; i++) yield first + i;
}

/** Who holds which block: Map from block number to the requests' keys. */
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

/** One square. `colours` are its holders'; none: free, and `cached` says whether its content is kept. */
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
    this.lit = null; // the key of the request, or the number of the block, that is pointed at
  }

  /** Draws, and returns how many blocks at the end are not shown because they are all free. */
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

  /** Up to the last block that is not plainly free. */
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
