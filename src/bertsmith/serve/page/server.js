// Questions to the server that sent the page, and its mistakes as one line.

const LETTERED = { first: "A", second: "B", "first with second": "A with B" };

/** What went wrong, in one line to show. */
export class ApiError extends Error {}

/** That nothing is answered without a key, and none was given yet. */
export class KeyWanted extends ApiError {}

/** The reply to a GET, or to a POST if there is a body. */
export async function ask(path, body, signal) {
  const reply = await send(path, body, signal);
  const content = await contentOf(reply);
  if (reply.status === 401) refuseKey();
  if (!reply.ok) throw new ApiError(complaint(reply, content, body));
  if (content === null) throw new ApiError(`the server's reply to ${path} is not JSON`);
  return content;
}

/** Keep a key for this browser tab and send it from now on. */
export function useKey(key) {
  sessionStorage.setItem("key", key);
}

function refuseKey() {
  document.dispatchEvent(new CustomEvent("keywanted"));
  if (sessionStorage.getItem("key")) throw new ApiError("This key is not the right one: try another.");
  throw new KeyWanted("Whoever started this server knows its key.");
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
    throw new ApiError("the server does not answer: is bertsmith serve still running?");
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

function complaint(reply, content, body) {
  const said = content?.error?.message ?? `the server replied ${reply.status} ${reply.statusText}`.trim();
  const wait = reply.headers.get("retry-after");
  const line = inWords(String(said).split("\n", 1)[0], body);
  return reply.status === 429 && wait ? `${line} (try again in ${wait} s)` : line;
}

/** A line of the server that begins with a field of the request, with the name that the field has on the page. */
function inWords(line, body) {
  const found = /^(first with second|\w+)(?:\[(\d+)\])?(?:\[(\d)\])?: (?=is |has |holds )/.exec(line);
  return found ? `${nameOf(found.slice(1), body)} ${line.slice(found[0].length)}` : line;
}

function nameOf([field, number, part], body) {
  if (part !== undefined) return part === "0" ? "the first text" : "the second text";
  if (number === undefined) return LETTERED[field] ?? `the ${field}`;
  return body[field].length > 1 ? `${field.slice(0, -1)} ${Number(number) + 1}` : "the text";
}
