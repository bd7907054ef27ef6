// Reasoning and tool calls of an answer, folded above its text. A model's output is always set as text, never as HTML.

function fold(kind, title) {
  const details = document.createElement("details");
  details.className = `fold ${kind}`;
  const summary = document.createElement("summary");
  summary.textContent = title;
  const body = document.createElement("pre");
  details.append(summary, body);
  return { details, body };
}

export class Folds {
  /** `said` is the element of the answer's text. */
  constructor(said) {
    this.said = said;
    this.reasoning = "";
    this.calls = []; // as the API has them in messages
    this.bodies = [];
  }

  /** Takes a chunk's delta. Returns whether it had anything for a fold. */
  take(delta) {
    if (delta.reasoning) this.#reason(delta.reasoning);
    for (const piece of delta.tool_calls ?? []) this.#call(piece);
    return Boolean(delta.reasoning || delta.tool_calls?.length);
  }

  #reason(text) {
    if (!this.thought) {
      this.thought = fold("reasoning", "Reasoning");
      this.said.before(this.thought.details);
    }
    this.reasoning += text;
    this.thought.body.textContent = this.reasoning;
  }

  #call(piece) {
    if (piece.id) {
      const { name } = piece.function ?? piece.custom;
      const made = fold("call", `Call of ${name}`);
      this.said.after(...this.bodies.map((each) => each.details), made.details);
      this.bodies[piece.index] = made;
      this.calls[piece.index] = { id: piece.id, type: "function", function: { name, arguments: "" } };
    }
    const call = this.calls[piece.index];
    call.function.arguments += piece.function?.arguments ?? piece.custom?.input ?? "";
    this.bodies[piece.index].body.textContent = call.function.arguments;
  }
}
