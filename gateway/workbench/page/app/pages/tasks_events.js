// The events of one task, as they come: its changes, its answer so far, and the journal of both.
import { useEffect, useState } from "../parts/html.js";
import { ApiError, events } from "../api.js";
import { whilePresent } from "../presence.js";

/** States after which nothing comes. */
export const ENDED = new Set(["completed", "failed", "cancelled"]);
export const MAX_JOURNAL = 1000;
/** Of a longer answer the page shows the end while it comes; the result has all of it. */
const MAX_TEXT_CHARS = 200_000;
const RETRY_MILLISECONDS = 1000;
/** The number of an event has its attempt in the upper bits. */
const ATTEMPT = 2 ** 32;

/** @typedef {{key: string, attempt: number, number: number, what: string, text: string}} JournalRow */
/** @typedef {{task: any, text: string, reasoning: string, journal: JournalRow[], error: unknown}} TaskNews */

/** @type {TaskNews} */
const NOTHING = { task: null, text: "", reasoning: "", journal: [], error: null };

/** Follows a task to its end; `path` is empty while no one wants to know. @param {string} path @returns {TaskNews} */
export function useTaskEvents(path) {
  const [news, setNews] = useState(NOTHING);
  useEffect(() => {
    if (!path) return undefined;
    const stop = new AbortController();
    void follow(path, stop.signal, setNews);
    return () => stop.abort();
  }, [path]);
  return news;
}

/** @param {string} path @param {AbortSignal} whole @param {(news: TaskNews) => void} show */
async function follow(path, whole, show) {
  const reader = new Reader();
  let frame = 0;
  const soon = () => {
    // A long answer has thousands of events.
    if (!frame) frame = setTimeout(() => ((frame = 0), whole.aborted || show(reader.news())), 50);
  };
  const read = async (/** @type {AbortSignal} */ signal) => {
    const query = reader.last ? { after: reader.last } : {};
    for await (const { event, data } of events("GET", `${path}/events`, { query, signal })) {
      if (data) reader.take(event, JSON.parse(data));
      soon();
    }
  };
  while (!whole.aborted && !reader.isAtEnd) {
    try {
      await whilePresent(read, whole);
      reader.error = null;
      reader.isAtEnd ||= ENDED.has(reader.task?.state);
    } catch (error) {
      if (whole.aborted) return;
      reader.error = error;
      if (error instanceof ApiError && error.status >= 400 && error.status < 500) reader.isAtEnd = true;
    }
    soon();
    if (!reader.isAtEnd) await new Promise((resolve) => setTimeout(resolve, RETRY_MILLISECONDS));
  }
}

class Reader {
  constructor() {
    /** @type {any} */
    this.task = null;
    this.last = 0;
    this.attempt = 0;
    this.text = "";
    this.reasoning = "";
    /** @type {JournalRow[]} */
    this.journal = [];
    /** @type {unknown} */
    this.error = null;
    this.isAtEnd = false;
    this.noted = 0;
  }

  /** @returns {TaskNews} */
  news() {
    return { task: this.task, text: this.text, reasoning: this.reasoning, journal: this.journal, error: this.error };
  }

  /** @param {string} event @param {any} body */
  take(event, body) {
    if (body.error && !event) throw new ApiError(0, body.error);
    if (event === "task") this.takeTask(body);
    else if (event === "output") this.takeOutput(body);
  }

  /** @param {any} task */
  takeTask(task) {
    const isNew = task.state !== this.task?.state || task.attempt !== this.task?.attempt || task.waiting_for !== this.task?.waiting_for;
    this.task = task;
    if (isNew) this.note(task.last_event, task.attempt, task.state, task.error?.message ?? task.waiting_for ?? "");
  }

  /** @param {any} output */
  takeOutput({ attempt, last_event: last, events: pieces = [], embeddings = [] }) {
    // What a lost attempt has written is not part of the answer.
    if (attempt !== this.attempt) [this.text, this.reasoning] = ["", ""];
    this.attempt = attempt;
    this.last = last;
    const text = pieces.map((/** @type {any} */ piece) => piece.delta?.text ?? "").join("");
    this.text = (this.text + text).slice(-MAX_TEXT_CHARS);
    this.reasoning = (this.reasoning + pieces.map((/** @type {any} */ piece) => piece.delta?.reasoning ?? "").join("")).slice(-MAX_TEXT_CHARS);
    const kinds = [...new Set(pieces.flatMap(Object.keys))];
    if (embeddings.length) kinds.unshift(`${embeddings.length} vectors`);
    this.note(last, attempt, kinds.join(", "), text);
  }

  /** @param {number} number @param {number} attempt @param {string} what @param {string} text */
  note(number, attempt, what, text) {
    const row = { key: String((this.noted += 1)), attempt, number: number % ATTEMPT, what, text: text.slice(0, 500) };
    this.journal = [...this.journal, row].slice(-MAX_JOURNAL);
  }
}
