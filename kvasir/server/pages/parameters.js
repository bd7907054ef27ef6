// The settings panel: built from one list, stored in the browser, written into a request's body.

const PARAMETERS = [
  { name: "system", label: "System prompt", kind: "textarea", rows: 2, why: "Instructions that come before the chat." },
  { name: "temperature", label: "Temperature", kind: "number", min: 0, max: 2, step: 0.1, value: "", why: "0: always the most likely token (greedy)." },
  { name: "top_p", label: "Top p", kind: "number", min: 0.05, max: 1, step: 0.05, value: "", why: "Sample from the most likely tokens with this total probability." },
  { name: "top_k", label: "Top k", kind: "number", min: 0, step: 1, value: "", why: "Sample from the k most likely tokens; 0: from all." },
  { name: "min_p", label: "Min p", kind: "number", min: 0, max: 1, step: 0.01, value: "", why: "Drop tokens less likely than this share of the best token's probability." },
  { name: "max_tokens", label: "Max tokens", kind: "number", min: 1, step: 1, value: 512 },
  { name: "repetition_penalty", label: "Repetition penalty", kind: "number", min: 0.5, max: 2, step: 0.05, value: "" },
  { name: "presence_penalty", label: "Presence penalty", kind: "number", min: -2, max: 2, step: 0.1, value: "" },
  { name: "frequency_penalty", label: "Frequency penalty", kind: "number", min: -2, max: 2, step: 0.1, value: "" },
  { name: "seed", label: "Seed", kind: "number", step: 1, value: "", why: "The same seed gives the same answer." },
  { name: "stop", label: "Stop sequences", kind: "text", value: "", why: "Texts that end the answer, separated by |." },
  { name: "top_logprobs", label: "Top logprobs", kind: "number", min: 0, max: 20, step: 1, value: 5, why: "Alternatives per token, shown on hover; 0: none." },
  { name: "schema", label: "JSON schema", kind: "textarea", rows: 3, why: "The answer is JSON of this schema." },
  { name: "tools", label: "Tools", kind: "textarea", rows: 3, why: "A JSON list of functions that the model may call; the next message is the result." },
  { name: "key", label: "API key", kind: "password", value: "", why: "Needed if the server requires one. Kept until the tab is closed." },
];
const SECRET = new Set(["key"]);
const NOT_SENT = new Set(["system", "stop", "top_logprobs", "schema", "tools", "key"]);

function remember(name, value) {
  try {
    (SECRET.has(name) ? sessionStorage : localStorage).setItem(`kvasir-${name}`, value);
  } catch {
    // storage is blocked: settings last until the page is closed
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

  /** JSON of a text area; undefined if it is empty or wrong. */
  #json(name) {
    try {
      return JSON.parse(this.get(name));
    } catch {
      return undefined;
    }
  }

  /** The label of a text area whose JSON is wrong. */
  wrong() {
    const bad = PARAMETERS.find(({ name }) => ["schema", "tools"].includes(name) && this.get(name).trim() && this.#json(name) === undefined);
    return bad?.label;
  }

  /** The fields of a request's body. An empty field is left out, so the model's default applies. `kind` is chat or
   * completion. */
  body(kind = "chat") {
    const found = {};
    for (const { name, kind: input } of PARAMETERS) {
      const text = this.inputs[name].value.trim();
      if (NOT_SENT.has(name) || text === "" || input === "text") continue;
      if (Number.isFinite(Number(text))) found[name] = Number(text);
    }
    const stop = this.get("stop").split("|").filter(Boolean);
    if (stop.length) found.stop = stop;
    const schema = this.#json("schema");
    if (schema) found.response_format = { type: "json_schema", json_schema: { name: "answer", schema } };
    const tools = kind === "chat" ? this.#json("tools") : undefined;
    if (Array.isArray(tools) && tools.length) found.tools = tools.map((each) => (each.type ? each : { type: "function", function: each }));
    return found;
  }

  alternatives() {
    return Math.min(20, Math.max(0, Math.trunc(Number(this.get("top_logprobs"))) || 0));
  }
}
