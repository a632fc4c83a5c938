// The lines of a batch's input file, checked in the page before the file is sent, by the rules that the gateway has for them.

export const ENDPOINTS = ["/v1/chat/completions", "/v1/completions", "/v1/embeddings", "/v1/responses"];
const MAX_CUSTOM_ID_CHARS = 256;
/** More problems than a person fixes in one go are not kept; the gateway names as many. */
const MAX_PROBLEMS = 100;
const UNPRINTABLE = /[\p{C}\p{Zl}\p{Zp}]/u;

/** One line that a batch would be refused for; `line` counts from 1, 0 is the file.
 * @typedef {{line: number, text: string}} LineProblem */

/** What a file has: its requests, their endpoint, their models with how many requests each has, and what is wrong.
 * @typedef {{requests: number, endpoint: string, models: Map<string, number>, problems: LineProblem[], hasMore: boolean}} Report */

/** Checks a file, a piece at a time. @param {Blob} file
 * @param {{onProgress?: (share: number) => void, signal?: AbortSignal}} [options] @returns {Promise<Report>} */
export async function checkFile(file, { onProgress, signal } = {}) {
  const check = new LineCheck();
  const reader = file.stream().getReader();
  const decoder = new TextDecoder("utf-8", { fatal: true });
  let rest = "";
  let seen = 0;
  try {
    for (;;) {
      const { done, value } = await reader.read();
      if (signal?.aborted) break;
      rest += decoder.decode(value, { stream: !done });
      if (done) break;
      const whole = rest.split("\n");
      rest = /** @type {string} */ (whole.pop());
      for (const line of whole) check.take(line);
      seen += value.length;
      onProgress?.(seen / file.size);
    }
    check.take(rest);
  } catch (error) {
    // The decoder has a TypeError; any other is of the reading, as of a file that has changed since it was chosen.
    check.fail(error instanceof TypeError ? "the file is not text in UTF-8" : "the file could not be read: choose it again", 0);
  } finally {
    reader.cancel().catch(() => {});
  }
  return check.report();
}

class LineCheck {
  constructor() {
    this.number = 0;
    this.requests = 0;
    this.endpoint = "";
    /** @type {Map<string, number>} */
    this.models = new Map();
    /** @type {LineProblem[]} */
    this.problems = [];
    this.hasMore = false;
    /** @type {Set<string>} */
    this.ids = new Set();
  }

  /** @param {string} text @param {number} [line] */
  fail(text, line = this.number) {
    if (this.problems.length < MAX_PROBLEMS) this.problems.push({ line, text });
    else this.hasMore = true;
  }

  /** @param {string} line */
  take(line) {
    this.number += 1;
    const text = line.trim();
    if (!text) return;
    this.requests += 1;
    let request;
    try {
      request = JSON.parse(text);
    } catch (error) {
      return this.fail(`the line is not valid JSON: ${error instanceof Error ? error.message : error}`);
    }
    if (!isObject(request)) return this.fail("the line must be a JSON object");
    this.takeRequest(request);
  }

  /** @param {Record<string, any>} request */
  takeRequest({ custom_id: id, method, url, body }) {
    if (this.isText("custom_id", id)) this.takeId(id);
    if (this.isText("method", method) && method !== "POST") this.fail("method: must be 'POST'");
    if (this.isText("url", url)) this.takeAddress(url);
    if (body === undefined) this.fail("body: is required");
    else if (!isObject(body)) this.fail("body: must be a JSON object");
    else if (typeof body.model !== "string" || !body.model) this.fail("body.model: is required");
    else this.models.set(body.model, (this.models.get(body.model) ?? 0) + 1);
  }

  /** @param {string} id */
  takeId(id) {
    if (!id || [...id].length > MAX_CUSTOM_ID_CHARS || UNPRINTABLE.test(id)) {
      this.fail(`custom_id: must be 1 to ${MAX_CUSTOM_ID_CHARS} printable characters`);
    } else if (this.ids.has(id)) this.fail("custom_id: another line of this file has the same one");
    this.ids.add(id);
  }

  /** @param {string} url */
  takeAddress(url) {
    if (!ENDPOINTS.includes(url)) this.fail(`url: must be one of ${ENDPOINTS.join(", ")}`);
    else if (this.endpoint && url !== this.endpoint) this.fail(`url: must be '${this.endpoint}', as in the lines before`);
    else this.endpoint = url;
  }

  /** @param {string} name @param {unknown} value */
  isText(name, value) {
    if (typeof value === "string") return true;
    this.fail(value === undefined ? `${name}: is required` : `${name}: must be a text`);
    return false;
  }

  /** @returns {Report} */
  report() {
    if (!this.requests && !this.problems.length) this.fail("the file has no requests", 0);
    const { requests, endpoint, models, problems, hasMore } = this;
    return { requests, endpoint, models, problems, hasMore };
  }
}

/** @param {unknown} value */
const isObject = (value) => typeof value === "object" && value !== null && !Array.isArray(value);
