// Text as tokens, each with its probability. A model's output is always set as text, never as HTML.

/** One token with its alternatives: {text, logprob, others: [{text, logprob}]}. */
function chatTokens(logprobs) {
  return (logprobs?.content ?? []).map((token) => ({
    text: token.token,
    logprob: token.logprob,
    others: (token.top_logprobs ?? []).map((other) => ({ text: other.token, logprob: other.logprob })),
  }));
}

function completionTokens(logprobs) {
  return (logprobs?.tokens ?? []).map((text, i) => ({
    text,
    logprob: logprobs.token_logprobs[i],
    others: Object.entries(logprobs.top_logprobs?.[i] ?? {}).map(([other, logprob]) => ({ text: other, logprob })),
  }));
}

export const readers = {
  chat: (choice) => [choice.delta?.content ?? "", chatTokens(choice.logprobs)],
  completion: (choice) => [choice.text ?? "", completionTokens(choice.logprobs)],
};

/** Shows text as it arrives. The text is authoritative; tokens are matched to it as far as possible. */
export class TokenText {
  constructor(element) {
    this.element = element;
    this.held = []; // tokens whose text has not arrived: a character can take several tokens
    this.text = "";
  }

  /** One chunk can hold several tokens. Tokens found at the start or the end of the text get spans of their own; the
   * rest, such as a character made of several tokens, shares one span. */
  add(text, tokens) {
    this.text += text;
    tokens = [...this.held, ...tokens];
    const last = [];
    while (tokens[0]?.text && text.startsWith(tokens[0].text)) {
      text = text.slice(tokens[0].text.length);
      this.#append(tokens[0].text, [tokens.shift()]);
    }
    while (tokens.length > 1 && tokens.at(-1).text && text.endsWith(tokens.at(-1).text)) {
      text = text.slice(0, -tokens.at(-1).text.length);
      last.unshift(tokens.pop());
    }
    this.held = text ? [] : tokens;
    if (text) this.#append(text, tokens);
    for (const token of last) this.#append(token.text, [token]);
  }

  #append(text, tokens) {
    const span = document.createElement("span");
    span.className = "token";
    span.textContent = text;
    if (tokens.length) {
      span.tokens = tokens;
      span.dataset.sure = sureness(Math.min(...tokens.map((token) => token.logprob)));
    }
    this.element.append(span);
  }
}

/** From 3, nearly certain, to 0, unlikely. */
function sureness(logprob) {
  const share = Math.exp(logprob);
  return share > 0.8 ? 3 : share > 0.4 ? 2 : share > 0.1 ? 1 : 0;
}

export function visible(text) {
  return text.replaceAll(" ", "␣").replaceAll("\n", "⏎").replaceAll("\t", "⇥") || "∅";
}

function percent(logprob) {
  const share = 100 * Math.exp(logprob);
  return share >= 99.95 ? "100 %" : share >= 10 ? `${share.toFixed(1)} %` : `${share.toPrecision(2)} %`;
}

// ---------------------------------------------------------------- the tooltip

function line(text, logprob, chosen) {
  const row = document.createElement("div");
  row.className = chosen ? "line chosen" : "line";
  const bar = document.createElement("i");
  bar.className = "bar";
  bar.style.width = `${Math.max(1, 100 * Math.exp(logprob))}%`;
  const label = document.createElement("span");
  label.className = "text";
  label.textContent = visible(text);
  const share = document.createElement("span");
  share.className = "share";
  share.textContent = percent(logprob);
  row.append(bar, label, share);
  return row;
}

function describe(tooltip, tokens) {
  tooltip.replaceChildren();
  for (const token of tokens) {
    const rest = token.others.filter((other) => other.text !== token.text);
    const all = [{ ...token, chosen: true }, ...rest].sort((a, b) => b.logprob - a.logprob);
    for (const each of all) tooltip.append(line(each.text, each.logprob, each.chosen));
  }
  const note = document.createElement("div");
  note.className = "note";
  note.textContent = tokens.length > 1 ? "These tokens form one piece of text." : "Bold: the sampled token. The others are alternatives.";
  tooltip.append(note);
}

/** Shows the probabilities of the token under the pointer, or of the one selected with the arrow keys. */
export function explainTokens(root, tooltip) {
  let shown = null;

  function hide() {
    shown?.classList.remove("shown");
    shown = null;
    tooltip.hidden = true;
  }

  function show(span) {
    if (span === shown) return;
    hide();
    if (!span?.tokens) return;
    shown = span;
    span.classList.add("shown");
    describe(tooltip, span.tokens);
    tooltip.hidden = false;
    const at = span.getClientRects()[0] ?? span.getBoundingClientRect();
    const left = Math.min(Math.max(8, at.left - 12), innerWidth - tooltip.offsetWidth - 8);
    const below = at.bottom + 8; // below, so that the text before it stays visible
    const above = at.top - tooltip.offsetHeight - 8;
    tooltip.style.left = `${left}px`;
    tooltip.style.top = `${below + tooltip.offsetHeight < innerHeight - 8 ? below : above}px`;
  }

  root.addEventListener("pointerover", (event) => show(event.target.closest(".token")));
  root.addEventListener("pointerleave", hide);
  root.addEventListener("scroll", hide, true);
  root.addEventListener("focusout", hide);
  root.addEventListener("keydown", (event) => {
    const said = event.target.closest(".said");
    if (!said || !["ArrowLeft", "ArrowRight", "Escape"].includes(event.key)) return;
    if (event.key === "Escape") return hide();
    const spans = [...said.querySelectorAll(".token")];
    const now = spans.indexOf(shown);
    const next = event.key === "ArrowRight" ? now + 1 : now < 0 ? spans.length - 1 : now - 1;
    event.preventDefault();
    show(spans[Math.min(Math.max(next, 0), spans.length - 1)]);
  });
}
