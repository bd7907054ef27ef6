// One colour per request: different from its neighbours', and stable while the request is shown.

const hues = new Map(); // by key
let seen = 0;

export function colourOf(key, lightness = 0.68) {
  if (!hues.has(key)) hues.set(key, (255 + 137.508 * seen++) % 360);
  return `oklch(${lightness} 0.13 ${hues.get(key).toFixed(1)})`;
}

/** Drops the colours of requests that have ended. */
export function forgetColours(present) {
  if (hues.size < 500) return;
  for (const key of hues.keys()) if (!present.has(key)) hues.delete(key);
}

const resolved = new Map(); // colours by name, in the current theme

/** A colour of the style sheet in the form a canvas needs. */
export function themed(name) {
  if (!resolved.has(name)) {
    const probe = document.createElement("i");
    probe.style.color = `var(${name})`;
    document.body.append(probe);
    resolved.set(name, getComputedStyle(probe).color);
    probe.remove();
  }
  return resolved.get(name);
}

document.addEventListener("themechange", () => resolved.clear());
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => resolved.clear());

/** A canvas's context, scaled so that one unit is one CSS pixel, and cleared. */
export function paper(canvas) {
  const ratio = window.devicePixelRatio || 1;
  const width = canvas.clientWidth;
  const height = canvas.clientHeight;
  if (canvas.width !== Math.round(width * ratio) || canvas.height !== Math.round(height * ratio)) {
    canvas.width = Math.round(width * ratio);
    canvas.height = Math.round(height * ratio);
  }
  const context = canvas.getContext("2d");
  context.setTransform(ratio, 0, 0, ratio, 0, 0);
  context.clearRect(0, 0, width, height);
  return { context, width, height };
}
