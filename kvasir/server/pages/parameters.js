// The settings panel: made from one list, kept in the browser, read into a request's body.

const PARAMETERS = [
  { name: "system", label: "System prompt", kind: "textarea", rows: 2, why: "What the model is told before the chat." },
  { name: "temperature", label: "Temperature", kind: "number", min: 0, max: 2, step: 0.1, value: "", why: "0 always takes the likeliest token." },
  { name: "top_p", label: "Top p", kind: "number", min: 0.05, max: 1, step: 0.05, value: "", why: "Draw from the likeliest tokens that make up this share." },
  { name: "top_k", label: "Top k", kind: "number", min: 0, step: 1, value: "", why: "Draw from so many; 0: from all." },
  { name: "min_p", label: "Min p", kind: "number", min: 0, max: 1, step: 0.01, value: "", why: "Leave out what is less likely than this share of the best." },
  { name: "max_tokens", label: "Most tokens", kind: "number", min: 1, step: 1, value: 512 },
  { name: "repetition_penalty", label: "Repetition penalty", kind: "number", min: 0.5, max: 2, step: 0.05, value: "" },
  { name: "presence_penalty", label: "Presence penalty", kind: "number", min: -2, max: 2, step: 0.1, value: "" },
  { name: "frequency_penalty", label: "Frequency penalty", kind: "number", min: -2, max: 2, step: 0.1, value: "" },
  { name: "seed", label: "Seed", kind: "number", step: 1, value: "", why: "The same seed gives the same answer." },
  { name: "stop", label: "Stop at", kind: "text", value: "", why: "Text that ends the answer; several with | between." },
  { name: "top_logprobs", label: "Alternatives per token", kind: "number", min: 0, max: 20, step: 1, value: 5, why: "Shown on hover; 0: none are asked for." },
  { name: "key", label: "API key", kind: "password", value: "", why: "If the server asks for one. Forgotten when the tab is closed." },
];
const SECRET = new Set(["key"]);
const NOT_SENT = new Set(["system", "stop", "top_logprobs", "key"]);

function remember(name, value) {
  try {
    (SECRET.has(name) ? sessionStorage : localStorage).setItem(`kvasir-${name}`, value);
  } catch {
    // storage is forbidden; settings last as long as the page
  }
}

function recall(name) {
  try {
    return (SECRET.has(name) ? sessionStorage : localStorage).getItem(`kvasir-${name}`);
  } catch {
    return null;
  }
}

function makeInput(parameter) {
  const input = document.createElement(parameter.kind === "textarea" ? "textarea" : "input");
  if (parameter.kind === "textarea") input.rows = parameter.rows;
  else input.type = parameter.kind;
  for (const limit of ["min", "max", "step"]) if (limit in parameter) input[limit] = parameter[limit];
  if (parameter.kind === "password") input.autocomplete = "off";
  if (parameter.kind === "number") input.placeholder = "default";
  input.id = `parameter-${parameter.name}`;
  input.value = recall(parameter.name) ?? parameter.value ?? "";
  return input;
}

export class Parameters {
  constructor(form) {
    this.inputs = {};
    for (const parameter of PARAMETERS) form.append(this.#label(parameter));
    form.addEventListener("submit", (event) => event.preventDefault());
  }

  #label(parameter) {
    const label = document.createElement("label");
    const name = document.createElement("span");
    name.textContent = parameter.label;
    const input = makeInput(parameter);
    this.inputs[parameter.name] = input;
    label.append(name);
    label.append(input);
    if (parameter.why) {
      const why = document.createElement("span");
      why.className = "why";
      why.textContent = parameter.why;
      label.append(why);
    }
    input.addEventListener("change", () => remember(parameter.name, input.value));
    return label;
  }

  get(name) {
    return this.inputs[name].value;
  }

  /** What stands in a request's body; where a field is empty the model's own setting counts. */
  body() {
    const found = {};
    for (const { name, kind } of PARAMETERS) {
      const text = this.inputs[name].value.trim();
      if (NOT_SENT.has(name) || text === "" || kind === "text") continue;
      if (Number.isFinite(Number(text))) found[name] = Number(text);
    }
    const stop = this.get("stop").split("|").filter(Boolean);
    if (stop.length) found.stop = stop;
    return found;
  }

  alternatives() {
    return Math.min(20, Math.max(0, Math.trunc(Number(this.get("top_logprobs"))) || 0));
  }
}
