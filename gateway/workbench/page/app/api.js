// Calls of the mesh's public HTTP API: JSON, server-sent events, and errors with the server's own words.
import { ROOT } from "./mesh.js";

/** The key of this tab: null where callers need none. Only `session.js` sets it. */
let bearer = /** @type {string | null} */ (null);
/** What is called when the server refuses the key. */
let onRefusedKey = () => {};

/** @param {string | null} key @param {() => void} refused */
export function useKey(key, refused) {
  bearer = key;
  onRefusedKey = refused;
}

/** An answer that is not 2xx, or none at all (status 0). */
export class ApiError extends Error {
  /** @param {number} status @param {{message?: string, code?: string, param?: string | null}} error @param {string} requestId */
  constructor(status, error, requestId = "") {
    super(error.message || `the server answered ${status}`);
    this.name = "ApiError";
    this.status = status;
    this.code = error.code ?? "";
    this.param = error.param ?? "";
    this.requestId = requestId;
  }
}

/**
 * @typedef {{
 *   query?: Record<string, string | number | boolean | undefined | null>,
 *   body?: unknown, form?: FormData | Blob, headers?: Record<string, string>, signal?: AbortSignal,
 * }} CallOptions
 */

/** The address of a path with its query; parameters without a value are left out.
 * @param {string} path @param {CallOptions["query"]} query */
function withQuery(path, query = {}) {
  const given = Object.entries(query).filter(([, value]) => value !== undefined && value !== null && value !== "");
  const text = new URLSearchParams(given.map(([name, value]) => [name, String(value)])).toString();
  return ROOT + (text ? `${path}?${text}` : path);
}

/** Sends one request. Raises ApiError for every answer that is not 2xx.
 * @param {string} method @param {string} path @param {CallOptions} [options] @returns {Promise<Response>} */
export async function send(method, path, { query, body, form, headers = {}, signal } = {}) {
  /** @type {Record<string, string>} */
  const sent = { ...headers };
  if (bearer !== null) sent["Authorization"] = `Bearer ${bearer}`;
  if (body !== undefined) sent["Content-Type"] = "application/json";
  const content = form ?? (body === undefined ? undefined : JSON.stringify(body));
  let response;
  try {
    response = await fetch(withQuery(path, query), { method, headers: sent, body: content, signal, cache: "no-store" });
  } catch (error) {
    if (signal?.aborted) throw error;
    throw new ApiError(0, { message: "The gateway does not answer.", code: "unreachable" });
  }
  if (response.ok) return response;
  const failure = await failureOf(response);
  if (response.status === 401) onRefusedKey();
  throw failure;
}

/** @param {Response} response */
async function failureOf(response) {
  const requestId = response.headers.get("x-request-id") ?? "";
  try {
    const answer = await response.json();
    return new ApiError(response.status, answer.error ?? {}, requestId);
  } catch {
    return new ApiError(response.status, {}, requestId);
  }
}

/** Sends one request and returns its JSON answer; null where the answer is empty.
 * @param {string} method @param {string} path @param {CallOptions} [options] @returns {Promise<any>} */
export async function call(method, path, options) {
  const response = await send(method, path, options);
  const text = await response.text();
  return text ? JSON.parse(text) : null;
}

/** @param {string} path @param {CallOptions["query"]} [query] @param {AbortSignal} [signal] */
export const get = (path, query, signal) => call("GET", path, { query, signal });
/** @param {string} path @param {unknown} [body] @param {CallOptions} [options] */
export const post = (path, body = {}, options = {}) => call("POST", path, { ...options, body });
/** @param {string} path @param {unknown} body @param {CallOptions} [options] */
export const put = (path, body, options = {}) => call("PUT", path, { ...options, body });
/** @param {string} path @param {CallOptions} [options] */
export const remove = (path, options = {}) => call("DELETE", path, options);

/** A name as one segment of a path. @param {string} name */
export const segment = (name) => encodeURIComponent(name);

/** The longest line of a stream that is kept: an event of the mesh is far shorter. */
const MAX_LINE_CHARS = 32 * 1024 * 1024;

/** Sends a request and returns the lines of its answer as they come.
 * @param {string} method @param {string} path @param {CallOptions} [options] @returns {AsyncGenerator<string>} */
export async function* lines(method, path, options) {
  const response = await send(method, path, options);
  const reader = /** @type {ReadableStream<Uint8Array>} */ (response.body).getReader();
  const decoder = new TextDecoder();
  let rest = "";
  try {
    for (;;) {
      const { done, value } = await reader.read();
      if (done) break;
      rest += decoder.decode(value, { stream: true });
      const whole = rest.split("\n");
      rest = /** @type {string} */ (whole.pop());
      if (rest.length > MAX_LINE_CHARS) throw new ApiError(0, { message: "A line of the stream is too long." });
      yield* whole;
    }
  } finally {
    reader.cancel().catch(() => {});
  }
}

/** One server-sent event, or a comment of the stream.
 * @typedef {{event: string, data: string, comment: string}} StreamEvent */

/** Sends a request and returns the server-sent events of its answer, comments included.
 * @param {string} method @param {string} path @param {CallOptions} [options] @returns {AsyncGenerator<StreamEvent>} */
export async function* events(method, path, options) {
  let event = "";
  /** @type {string[]} */
  let data = [];
  for await (const raw of lines(method, path, options)) {
    const line = raw.endsWith("\r") ? raw.slice(0, -1) : raw;
    if (line === "") {
      if (data.length) yield { event, data: data.join("\n"), comment: "" };
      event = "";
      data = [];
    } else if (line.startsWith(":")) yield { event: "", data: "", comment: line.slice(1).trim() };
    else if (line.startsWith("data:")) data.push(line.slice(line[5] === " " ? 6 : 5));
    else if (line.startsWith("event:")) event = line.slice(6).trim();
  }
}
