// Calls the server this page came from: OpenAI's endpoints and their server-sent events.

export const base = new URL(".", document.baseURI);

export class ApiError extends Error {
  constructor(message, status) {
    super(message);
    this.status = status;
  }
}

/** The API key entered in the playground's settings. */
export function storedKey() {
  try {
    return sessionStorage.getItem("kvasir-key") ?? "";
  } catch {
    return ""; // storage is blocked
  }
}

export function keepKey(key) {
  try {
    sessionStorage.setItem("kvasir-key", key);
  } catch {
    // storage is blocked
  }
}

function headers(key) {
  const found = { "Content-Type": "application/json" };
  if (key) found.Authorization = `Bearer ${key}`;
  return found;
}

async function refuse(response) {
  let said = "";
  try {
    const body = await response.json();
    said = body.error?.message ?? body.message ?? body.detail ?? "";
  } catch {
    // not JSON: show the status instead
  }
  throw new ApiError(said || `The server answered ${response.status} ${response.statusText}.`, response.status);
}

export async function get(path, key) {
  const response = await fetch(new URL(path, base), { headers: headers(key) });
  if (!response.ok) await refuse(response);
  return response.json();
}

export async function post(path, body, key) {
  const asked = { method: "POST", headers: headers(key), body: JSON.stringify(body) };
  const response = await fetch(new URL(path, base), asked);
  if (!response.ok) await refuse(response);
  return response.json();
}

export async function models(key) {
  return (await modelCards(key)).map((model) => model.id);
}

/** The same with all that the server says of them; an adapter has a parent. */
export async function modelCards(key) {
  return (await get("v1/models", key)).data;
}

/** Sends a request and yields the objects of its stream. Aborting `signal` closes the connection, which aborts it. */
export async function* stream(path, body, key, signal) {
  const asked = { method: "POST", headers: headers(key), body: JSON.stringify(body), signal };
  const response = await fetch(new URL(path, base), asked);
  if (!response.ok) await refuse(response);
  // Read to the end, past [DONE]: a browser does not reuse the connection of a response that was not read to its end.
  for await (const data of events(response.body)) {
    if (data === "[DONE]") continue;
    const chunk = JSON.parse(data);
    if (chunk.error) throw new ApiError(chunk.error.message ?? "The server ended the stream with an error.");
    yield chunk;
  }
}

/** The data of each server-sent event. */
async function* events(body) {
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  try {
    for (;;) {
      const { value, done } = await reader.read();
      if (done) return;
      rest += value.replaceAll("\r\n", "\n");
      let end;
      while ((end = rest.indexOf("\n\n")) >= 0) {
        const lines = rest.slice(0, end).split("\n");
        rest = rest.slice(end + 2);
        const data = lines.filter((line) => line.startsWith("data:")).map((line) => line.slice(5).trimStart());
        if (data.length) yield data.join("\n");
      }
    }
  } finally {
    reader.cancel().catch(() => {}); // the reader stopped early: discard the rest
  }
}
