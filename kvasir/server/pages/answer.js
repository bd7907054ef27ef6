// One answer, while it streams and after: its text, its timing and how it ended.

import { ApiError, stream } from "./api.js";
import { Folds } from "./folds.js";
import { TokenText, readers } from "./tokens.js";

export class Answer {
  /** `kind` is chat or completion; `said` is the element for its text, `after` the one for its figures. */
  constructor(kind, said, after) {
    this.kind = kind;
    this.after = after;
    this.said = said;
    this.tokens = new TokenText(said);
    this.folds = new Folds(said);
    this.usage = null;
    this.reason = null;
    this.stopping = new AbortController();
  }

  get text() {
    return this.tokens.text;
  }

  /** The answer as a message of the chat. */
  get message() {
    const { calls, reasoning } = this.folds;
    const thought = reasoning ? { reasoning } : {};
    return { role: "assistant", content: this.text, ...thought, ...(calls.length ? { tool_calls: calls } : {}) };
  }

  stop() {
    this.stopping.abort();
  }

  /** Runs until the answer is complete, stopped or failed. Returns whether there is any text or call. */
  async run(path, body, key, onText) {
    this.began = performance.now();
    this.first = this.last = null;
    this.count = 0;
    this.said.classList.add("streaming");
    try {
      for await (const chunk of stream(path, body, key, this.stopping.signal)) {
        this.#take(chunk);
        onText?.();
      }
    } catch (error) {
      if (error.name === "AbortError") this.reason = "stopped by you";
      else this.#fail(error instanceof ApiError ? error.message : "The server cannot be reached. Check that it is running.");
    }
    this.said.classList.remove("streaming");
    this.#figures();
    return this.text !== "" || this.folds.calls.length > 0;
  }

  #take(chunk) {
    this.usage = chunk.usage ?? this.usage;
    const choice = chunk.choices?.[0];
    if (!choice) return;
    this.reason = choice.finish_reason ?? this.reason;
    const folded = this.folds.take(choice.delta ?? {});
    const [text, tokens] = readers[this.kind](choice);
    if (!folded && !text && !tokens.length) return;
    this.count += tokens.length || 1;
    this.last = performance.now();
    this.first ??= this.last;
    if (text || !folded) this.tokens.add(text, folded ? [] : tokens); // tokens of folded text are not shown
  }

  #fail(message) {
    const line = document.createElement("p");
    line.className = "failed";
    line.setAttribute("role", "alert");
    line.textContent = message;
    this.after.before(line);
  }

  #figures() {
    const figures = document.createElement("span");
    figures.className = "figures";
    figures.textContent = this.#describe().join(" · ");
    this.after.append(figures);
  }

  #describe() {
    const words = [];
    const count = this.usage?.completion_tokens ?? this.count;
    if (this.first !== null) {
      words.push(`first token ${Math.round(this.first - this.began)} ms`);
      const seconds = (this.last - this.first) / 1000;
      if (count > 1 && seconds > 0) words.push(`${((count - 1) / seconds).toFixed(1)} tokens/s`);
      words.push(`${count} token${count === 1 ? "" : "s"}`);
    }
    const cached = this.usage?.prompt_tokens_details?.cached_tokens;
    if (cached) words.push(`${cached} of ${this.usage.prompt_tokens} prompt tokens cached`);
    if (this.reason && this.reason !== "stop") words.push({ length: "reached max tokens", tool_calls: "calls tools" }[this.reason] ?? this.reason);
    return words;
  }
}
