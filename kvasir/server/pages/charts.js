// The timeline of steps, the histograms and the memory table.

import { paper, themed } from "./colours.js";

const BAR = 7; // pixels a step takes
const LABEL = 46; // pixels for the figures at the side

/** Two lanes over the same steps: prompt tokens above, decode tokens below, each with its own scale. */
export function drawTimeline(canvas, steps) {
  const { context, width, height } = paper(canvas);
  const shown = steps.slice(-Math.floor((width - LABEL) / BAR));
  const lane = (height - 18) / 2;
  const at = (i) => width - (shown.length - i) * BAR; // the newest step is at the right
  const lanes = [
    ["prompt_tokens", "--prompt", lane],
    ["decode_tokens", "--decode", height],
  ];
  context.font = "11px system-ui, sans-serif";
  for (const [name, colour, bottom] of lanes) {
    const most = Math.max(1, ...shown.map((step) => step[name]));
    context.fillStyle = themed("--line");
    context.fillRect(LABEL, bottom - 1, width - LABEL, 1);
    context.fillStyle = themed("--muted");
    context.textAlign = "right";
    context.fillText(String(most), LABEL - 6, bottom - lane + 14);
    context.fillStyle = themed(colour);
    shown.forEach((step, i) => {
      const tall = (step[name] / most) * (lane - 6);
      context.fillRect(at(i), bottom - tall, BAR - 2, tall);
    });
  }
  context.fillStyle = themed("--warn");
  shown.forEach((step, i) => {
    if (!step.preemptions) return;
    context.beginPath();
    context.arc(at(i) + 2.5, lane + 9, 3.5, 0, 2 * Math.PI);
    context.fill();
  });
}

function seconds(value) {
  if (!Number.isFinite(value)) return "more";
  return value >= 1 ? `${+value.toPrecision(3)} s` : `${+(1000 * value).toPrecision(3)} ms`;
}

/** The bucket bound below which this share of the observations lies. */
function quantile({ bounds, counts }, share) {
  const total = counts.reduce((sum, count) => sum + count, 0);
  let below = 0;
  for (let i = 0; i < counts.length; i++) {
    below += counts[i];
    if (below >= share * total) return bounds[i] ?? Infinity;
  }
  return Infinity;
}

/** Draws bars over the range of observed values. Returns a summary in words. */
export function drawDistribution(canvas, distribution, colour) {
  const { context, width, height } = paper(canvas);
  const total = distribution.counts.reduce((sum, count) => sum + count, 0);
  if (!total) return "No measurements yet.";
  const first = distribution.counts.findIndex((count) => count > 0);
  const last = distribution.counts.findLastIndex((count) => count > 0);
  const from = Math.max(0, first - 1);
  const counts = distribution.counts.slice(from, Math.max(last + 2, from + 5));
  const most = Math.max(...counts);
  const wide = width / counts.length;
  context.font = "10px system-ui, sans-serif";
  context.textAlign = "center";
  counts.forEach((count, i) => {
    const tall = (count / most) * (height - 22);
    context.fillStyle = themed(colour);
    context.fillRect(i * wide + 1, height - 16 - tall, wide - 2, Math.max(tall, count ? 1 : 0));
    context.fillStyle = themed("--muted");
    context.fillText(`≤ ${seconds(distribution.bounds[from + i] ?? Infinity)}`, i * wide + wide / 2, height - 3, wide - 2);
  });
  const [half, most99] = [0.5, 0.99].map((share) => seconds(quantile(distribution, share)));
  return `p50 below ${half}, p99 below ${most99}, ${total.toLocaleString("en")} measurements.`;
}

// ---------------------------------------------------------------- memory

function size(bytes) {
  if (bytes >= 2 ** 30) return `${(bytes / 2 ** 30).toFixed(2)} GiB`;
  return `${(bytes / 2 ** 20).toFixed(bytes >= 2 ** 27 ? 0 : 1)} MiB`;
}

/** The use of memory: a bar and a table. */
export function drawLedger(bar, table, memory, blocks, totals) {
  const lines = [
    ["Weights", memory.weights, themed("--muted")],
    ["Activations of the largest step", memory.largest_step, themed("--prompt")],
    ["CUDA graphs", memory.graphs, themed("--prompt")],
    ["KV cache, used", blocks.used * blocks.bytes, themed("--decode")],
    ["KV cache, cached prefixes", blocks.cached * blocks.bytes, themed("--cached")],
    ["KV cache, free", (blocks.total - blocks.used - blocks.cached) * blocks.bytes, themed("--free")],
    ["Driver and other processes", memory.outside, themed("--line")],
  ].filter(([name, bytes]) => bytes || !["Activations of the largest step", "CUDA graphs", "Driver and other processes"].includes(name)); // measured on GPUs only
  const all = lines.reduce((sum, line) => sum + line[1], 0);
  bar.replaceChildren();
  const body = table.tBodies[0];
  body.replaceChildren();
  for (const [name, bytes, colour] of lines) {
    const part = document.createElement("i");
    part.style.width = `${(100 * bytes) / all}%`;
    part.style.background = colour;
    bar.append(part);
    const row = body.insertRow();
    const swatch = document.createElement("i");
    swatch.className = "swatch";
    swatch.style.background = colour;
    row.insertCell().append(swatch, name);
    row.insertCell().textContent = size(bytes);
  }
  const line = (name, words) => {
    const row = body.insertRow();
    row.insertCell().textContent = name;
    row.insertCell().textContent = words;
  };
  if (memory.largest_step === null) line("Activations of the largest step", "not measured");
  line(memory.total ? "Total, of the device's memory" : "Total", memory.total ? `${size(all)} of ${size(memory.total)}` : size(all));
  if (!totals.host_blocks) return;
  const held = totals.host_used_blocks + totals.host_cached_blocks;
  line("Host memory for swapped and offloaded blocks", `${size(held * blocks.bytes)} of ${size(totals.host_blocks * blocks.bytes)}`);
}
