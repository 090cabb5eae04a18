// Questions to the server that sent the page, and its mistakes as one line.

/** What went wrong, in one line to show. */
export class Refusal extends Error {}

/** The reply to a GET, or to a POST where there is a body. */
export async function ask(path, body, signal) {
  const reply = await send(path, body, signal);
  const content = await contentOf(reply);
  if (reply.status === 401) document.dispatchEvent(new CustomEvent("keywanted"));
  if (!reply.ok) throw new Refusal(complaint(reply, content));
  if (content === null) throw new Refusal(`the server's reply to ${path} is no JSON`);
  return content;
}

/** Keep a key for this browser tab and send it from now on. */
export function useKey(key) {
  sessionStorage.setItem("key", key);
}

async function send(path, body, signal) {
  const key = sessionStorage.getItem("key");
  const headers = {
    ...(body && { "content-type": "application/json" }),
    ...(key && { authorization: `Bearer ${key}` }),
  };
  const method = body ? "POST" : "GET";
  try {
    return await fetch(path, { method, headers, body: body && JSON.stringify(body), signal });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new Refusal("the server does not answer: is bertsmith serve still running?");
  }
}

async function contentOf(reply) {
  try {
    return await reply.json();
  } catch (error) {
    if (error instanceof SyntaxError) return null;
    throw error;
  }
}

function complaint(reply, content) {
  const said = content?.error?.message ?? `the server replied ${reply.status} ${reply.statusText}`.trim();
  const wait = reply.headers.get("retry-after");
  const line = String(said).split("\n", 1)[0];
  return reply.status === 429 && wait ? `${line} (try again in ${wait} s)` : line;
}
