// The state of the mesh, live: one stream of /api/v1/watch for all that the shown page looks at.
import { signal } from "@preact/signals";
import { useEffect } from "preact/hooks";
import { ApiError, events } from "./api.js";

/**
 * Documents of one kind by name; another object, with other `items`, after each change, at most once per frame.
 * @typedef {{items: Map<string, any>, isComplete: boolean, problem: string}} Collection
 */

/** Whether the stream is open: "connecting", "live" or "away"; "" while the page needs none. */
export const connection = signal("");
/** Why it is away. */
export const awayBecause = signal("");
/** How often the stream was opened again after it was lost: what was asked for by calls may be old by then. */
export const comebacks = signal(0);

const RETRY_MILLISECONDS = [250, 500, 1000, 2000, 5000];
/** Events are not state: only the newest of them are kept. */
const MAX_EVENTS = 1000;

/** @type {Map<string, import("@preact/signals").Signal<Collection>>} */
const collections = new Map();
/** How many shown components look at each kind. @type {Map<string, number>} */
const wanted = new Map();
/** Kinds that the gateway refused; they are asked again after it was away. @type {Set<string>} */
const refusedKinds = new Set();
/** The kinds of the stream that is open. */
let openKinds = "";
/** @type {AbortController | null} */
let stream = null;
let isScheduled = false;

/** The live documents of one kind. @param {string} kind */
export function collection(kind) {
  let found = collections.get(kind);
  if (!found) collections.set(kind, (found = signal({ items: new Map(), isComplete: false, problem: "" })));
  return found;
}

/** Watches kinds for as long as the component is shown. @param {string[]} kinds */
export function useLive(...kinds) {
  const names = kinds.join(",");
  useEffect(() => {
    for (const kind of kinds) wanted.set(kind, (wanted.get(kind) ?? 0) + 1);
    schedule();
    return () => {
      for (const kind of kinds) wanted.set(kind, (wanted.get(kind) ?? 1) - 1);
      schedule();
    };
  }, [names]);
}

/** Forgets what another caller was shown, and opens the stream again. */
export function restart() {
  for (const each of collections.values()) each.value = { items: new Map(), isComplete: false, problem: "" };
  openKinds = "";
  refusedKinds.clear();
  schedule();
}

/** Opens the stream for what is wanted now; once for all components of a page. */
function schedule() {
  if (isScheduled) return;
  isScheduled = true;
  setTimeout(() => {
    isScheduled = false;
    const kinds = [...wanted].filter(([kind, count]) => count > 0 && !refusedKinds.has(kind)).map(([kind]) => kind);
    const names = kinds.sort().join(",");
    if (names === openKinds) return;
    openKinds = names;
    stream?.abort();
    stream = null;
    // Who goes to another page while the mesh is away still has to learn what changed meanwhile.
    if (!names) connection.value = "";
    else if (connection.value !== "away") connection.value = "connecting";
    if (names) void follow(kinds, (stream = new AbortController()).signal);
  }, 20);
}

/** Reads the stream until it is aborted; begins again after every end. @param {string[]} kinds @param {AbortSignal} signal */
async function follow(kinds, signal) {
  let asked = kinds;
  for (let failures = 0; !signal.aborted; failures += 1) {
    const updates = new Updates(asked);
    try {
      for await (const { data, comment } of events("GET", "/api/v1/watch", { query: { kinds: asked.join(","), ...queryOf(asked) }, signal })) {
        failures = 0;
        if (connection.value !== "live") opened();
        if (data) updates.take(JSON.parse(data));
        else if (comment) continue;
      }
      awayBecause.value = "the stream ended";
    } catch (error) {
      if (signal.aborted) return;
      const failure = error instanceof ApiError ? error : new ApiError(0, { message: String(error) });
      awayBecause.value = failure.message;
      const without = withoutRefused(asked, failure);
      if (without) {
        asked = without;
        failures = -1;
        if (asked.length) continue;
        connection.value = "";
        return;
      }
    } finally {
      updates.stop();
      // What came just before the end is shown too.
      if (!signal.aborted) updates.show();
    }
    connection.value = "away";
    refusedKinds.clear();
    asked = kinds;
    await new Promise((resolve) => setTimeout(resolve, RETRY_MILLISECONDS[Math.min(failures, RETRY_MILLISECONDS.length - 1)]));
  }
}

/** Requests of all tenants, if the caller may name them; tasks only of its tenant. @param {string[]} kinds @returns {Record<string, string>} */
const queryOf = (kinds) => (kinds.includes("request") && !kinds.includes("task") ? { allTenants: "true" } : {});

function opened() {
  if (connection.value === "away") comebacks.value += 1;
  connection.value = "live";
}

/** The kinds without the one that the gateway refuses, which is not known to it or not for this key; that one has the refusal
 * as its problem, and the others are followed all the same. Null: it is another failure.
 * @param {string[]} kinds @param {ApiError} failure */
function withoutRefused(kinds, failure) {
  const refused = kinds[Number(/^kinds\[(\d+)\]$/.exec(failure.param)?.[1] ?? -1)];
  if (refused === undefined) return null;
  refusedKinds.add(refused);
  collection(refused).value = { ...collection(refused).value, problem: failure.message.replace(`${failure.param}: `, "") };
  return kinds.filter((kind) => kind !== refused);
}

/** Changes that a stream brought, shown once per frame: a snapshot has thousands of them. */
class Updates {
  /** @param {string[]} kinds */
  constructor(kinds) {
    /** What each kind becomes: a new map during a snapshot, so that what is gone is gone. @type {Map<string, Map<string, any>>} */
    this.maps = new Map(kinds.map((kind) => [kind, new Map()]));
    /** @type {Set<string>} */
    this.synced = new Set();
    /** @type {Map<string, string>} */
    this.problems = new Map();
    /** @type {Set<string>} */
    this.changed = new Set();
    this.frame = 0;
  }

  /** @param {{kind: string, change: string, name?: string, object?: any, message?: string, error?: any}} update */
  take({ kind, change, name = "", object, message = "", error }) {
    if (error) throw new ApiError(0, error);
    const map = this.maps.get(kind);
    if (!map) return;
    if (change === "put") {
      map.set(name, object);
      if (kind === "event" && map.size > MAX_EVENTS) map.delete(map.keys().next().value ?? "");
    } else if (change === "delete") map.delete(name);
    else if (change === "reset") {
      this.maps.set(kind, new Map());
      this.synced.delete(kind);
      this.problems.delete(kind);
    } else if (change === "synced") this.synced.add(kind);
    else if (change === "unavailable") this.problems.set(kind, message || "not available");
    this.changed.add(kind);
    // A hidden tab draws no frames.
    if (!this.frame) this.frame = document.hidden ? setTimeout(() => this.show(), 200) : requestAnimationFrame(() => this.show());
  }

  show() {
    this.frame = 0;
    for (const kind of this.changed) {
      const isComplete = this.synced.has(kind);
      const problem = this.problems.get(kind) ?? "";
      const target = collection(kind);
      // What is known stays until the new snapshot is whole.
      if (!isComplete && target.value.isComplete) target.value = { ...target.value, problem };
      else target.value = { items: new Map(this.maps.get(kind)), isComplete, problem };
    }
    this.changed.clear();
  }

  stop() {
    cancelAnimationFrame(this.frame);
    clearTimeout(this.frame);
  }
}
