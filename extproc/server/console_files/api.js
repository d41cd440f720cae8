// Data of the picker, as JSON.

/** Time in which a whole answer must be there (ms): a connection that broke may never say so. */
const TIMEOUT_MS = 20_000;

const UNAUTHORIZED = 401;

let token = "";
let onUnauthorized = () => {};

/** An answer that is no success; `status` is 0 where there was none, or not all of it. */
export class RequestError extends Error {
  constructor(status, message) {
    super(message);
    this.status = status;
  }
}

/** Send this token with all further requests. */
export function setToken(value) {
  token = value;
}

/** Call a function whenever the token is missing or wrong, as it may be replaced while a page is open. */
export function whenUnauthorized(call) {
  onUnauthorized = call;
}

/**
 * Read a page of the picker.
 *
 * @param path Relative to the console.
 * @param request Method, headers and body; a GET without any.
 */
export async function fetchJson(path, request = {}) {
  const sent = token;
  const authorization = sent ? { authorization: `Bearer ${sent}` } : {};
  const headers = new Headers({ ...request.headers, ...authorization });
  const abort = new AbortController();
  const timer = setTimeout(() => abort.abort(), TIMEOUT_MS);
  let response;
  let text;
  try {
    response = await fetch(path, {
      ...request,
      headers,
      cache: "no-store",
      credentials: "omit",
      redirect: "error",
      signal: abort.signal,
    });
    text = await response.text();
    if (response.ok) {
      return JSON.parse(text);
    }
  } catch {
    throw new RequestError(0, "the picker does not answer");
  } finally {
    clearTimeout(timer);
  }
  if (response.status === UNAUTHORIZED && sent === token) {
    onUnauthorized();
  }
  throw new RequestError(response.status, messageOf(text));
}

/** The message of an error in the shape of OpenAI's API, or the text itself. */
function messageOf(text) {
  try {
    return JSON.parse(text).error.message;
  } catch {
    return text.trim();
  }
}
