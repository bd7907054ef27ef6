// Similarity of two texts, a list in the order of its relevance, and a map of lines.

import { keepKey, models, post, storedKey } from "./api.js";

const find = (id) => document.getElementById(id);
const problem = find("problem");
const MOST_LINES = 500;

find("key").value = storedKey();
find("key").addEventListener("change", () => {
  keepKey(find("key").value);
  showModel();
});

async function showModel() {
  try {
    find("model").textContent = (await models(find("key").value))[0];
    problem.hidden = true;
  } catch (error) {
    complain(error);
  }
}

function complain(error) {
  problem.textContent = error.message;
  problem.hidden = false;
}

/** Runs `work` when a form is sent, with its button disabled meanwhile. */
function onSend(id, work) {
  const form = find(id);
  form.addEventListener("submit", async (event) => {
    event.preventDefault();
    const button = form.querySelector("button");
    button.disabled = true;
    problem.hidden = true;
    form.querySelector("output, ol, svg").replaceChildren(); // what stands there belongs to other texts
    try {
      await work();
    } catch (error) {
      complain(error);
    }
    button.disabled = false;
  });
}

const linesOf = (id) => find(id).value.split("\n").map((line) => line.trim()).filter(Boolean).slice(0, MOST_LINES);
const ask = (path, body) => post(path, { ...body, truncate_prompt_tokens: -1 }, find("key").value);

onSend("pair", async () => {
  const reply = await ask("v1/score", { text_1: find("first").value, text_2: find("second").value });
  find("similarity").textContent = reply.data[0].score.toFixed(4);
});

onSend("ranking", async () => {
  const documents = linesOf("documents");
  const reply = await ask("v1/rerank", { query: find("query").value, documents });
  find("ranked").replaceChildren(
    ...reply.results.map((each) => {
      const item = document.createElement("li");
      const score = document.createElement("b");
      score.textContent = each.relevance_score.toFixed(3);
      item.append(score, documents[each.index]);
      return item;
    }),
  );
});

onSend("map", async () => {
  const lines = linesOf("lines");
  if (lines.length < 3) throw new Error("Paste at least three lines.");
  const reply = await ask("v1/embeddings", { input: lines });
  draw(lines, project(reply.data.map((each) => each.embedding)));
});

// ---------------------------------------------------------------- two principal components

const dot = (a, b) => a.reduce((sum, value, i) => sum + value * b[i], 0);

function unit(a) {
  const size = Math.sqrt(dot(a, a)) || 1;
  return a.map((value) => value / size);
}

/** The direction in which centred vectors differ most: power iteration. */
function component(vectors) {
  let direction = unit(vectors[0].map((_, i) => Math.sin(i + 1)));
  for (let round = 0; round < 60; round++) {
    const next = new Array(direction.length).fill(0);
    for (const vector of vectors) {
      const share = dot(vector, direction);
      for (let i = 0; i < next.length; i++) next[i] += share * vector[i];
    }
    direction = unit(next);
  }
  return direction;
}

function project(vectors) {
  const mean = vectors[0].map((_, i) => vectors.reduce((sum, vector) => sum + vector[i], 0) / vectors.length);
  let rest = vectors.map((vector) => vector.map((value, i) => value - mean[i]));
  const axes = [0, 1].map(() => {
    const direction = component(rest);
    const places = rest.map((vector) => dot(vector, direction));
    rest = rest.map((vector, n) => vector.map((value, i) => value - places[n] * direction[i]));
    return places;
  });
  return vectors.map((_, n) => [axes[0][n], axes[1][n]]);
}

function draw(lines, points) {
  const [width, height, edge] = [640, 400, 40];
  const scale = (axis, size) => {
    const values = points.map((point) => point[axis]);
    const [low, high] = [Math.min(...values), Math.max(...values)];
    return (value) => edge + ((value - low) / (high - low || 1)) * (size - 2 * edge);
  };
  const [x, y] = [scale(0, width), scale(1, height)];
  const make = (name, attributes) => {
    const element = document.createElementNS("http://www.w3.org/2000/svg", name);
    for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
    return element;
  };
  find("plot").replaceChildren(
    ...points.flatMap((point, n) => {
      const [left, top] = [x(point[0]), y(point[1])];
      const end = left > width / 2;
      const label = make("text", { x: left + (end ? -8 : 8), y: top + 4, "text-anchor": end ? "end" : "start" });
      label.textContent = lines[n].slice(0, 40);
      return [make("circle", { cx: left, cy: top, r: 4 }), label];
    }),
  );
}

showModel();
