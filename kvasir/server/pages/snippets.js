// A request as a curl command or as a Python program.

/** `body` is undefined where the endpoint takes none. */
export function asCurl(url, body, needsKey, method = "POST") {
  const key = needsKey ? ` \\\n  -H "Authorization: Bearer $KVASIR_API_KEY"` : "";
  if (!body) return `curl ${method === "GET" ? "" : `-X ${method} `}${url}${key}`;
  const data = JSON.stringify(body, null, 2).replaceAll("'", "'\\''");
  return `curl ${url} \\\n  -H "Content-Type: application/json"${key} \\\n  -d '${data}'`;
}

/** JSON as a Python literal. */
function literal(value, indent = "") {
  const inner = `${indent}    `;
  if (value === null) return "None";
  if (value === true) return "True";
  if (value === false) return "False";
  if (Array.isArray(value)) {
    if (!value.length) return "[]";
    return `[\n${value.map((each) => `${inner}${literal(each, inner)},\n`).join("")}${indent}]`;
  }
  if (typeof value === "object") {
    const entries = Object.entries(value).map(([name, each]) => `${JSON.stringify(name)}: ${literal(each, inner)}`);
    return `{${entries.join(", ")}}`;
  }
  return JSON.stringify(value); // strings and numbers are the same in both
}

// Fields that OpenAI's client has no keyword for.
const EXTRA = new Set(["top_k", "min_p", "repetition_penalty"]);

export function asPython(url, kind, body, needsKey) {
  const isExtra = (name) => EXTRA.has(name) || (kind === "completion" && name === "response_format");
  const plain = Object.entries(body).filter(([name]) => !isExtra(name) && name !== "stream_options");
  const extra = Object.fromEntries(Object.entries(body).filter(([name]) => isExtra(name)));
  const lines = plain.map(([name, value]) => `    ${name}=${literal(value, "    ")},`);
  if (Object.keys(extra).length) lines.push(`    extra_body=${literal(extra, "    ")},`);
  const call = kind === "chat" ? "client.chat.completions.create" : "client.completions.create";
  const text = kind === "chat" ? "chunk.choices[0].delta.content or \"\"" : "chunk.choices[0].text";
  const key = needsKey ? 'os.environ["KVASIR_API_KEY"]' : '"unused"';
  return [
    ...(needsKey ? ["import os", ""] : []),
    "from openai import OpenAI",
    "",
    `client = OpenAI(base_url=${JSON.stringify(url)}, api_key=${key})`,
    `stream = ${call}(`,
    ...lines,
    ")",
    "for chunk in stream:",
    "    if chunk.choices:",
    `        print(${text}, end="", flush=True)`,
    "print()",
  ].join("\n");
}

/** Copies to the clipboard. Browsers hide the clipboard API from unencrypted pages of other machines; those use a text area. */
export async function copy(text) {
  if (navigator.clipboard) {
    await navigator.clipboard.writeText(text);
    return;
  }
  const area = document.createElement("textarea");
  area.value = text;
  area.className = "visually-hidden";
  document.body.append(area);
  area.select();
  document.execCommand("copy");
  area.remove();
}
