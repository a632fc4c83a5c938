// The state of the mesh, live: one stream of /api/v1/watch for all that the pages of this caller in this browser look at.
import { signal } from "@preact/signals";
import { useEffect } from "preact/hooks";
import { ApiError, events } from "./api.js";
import { Share } from "./live_share.js";
import { ROOT } from "./mesh.js";
import { isPresent } from "./presence.js";
import { caller } from "./session.js";
import { VERSION } from "./version.js";

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
/** Why the gateway refused kinds; they are asked for again after it was away. @type {Map<string, string>} */
const refusals = new Map();
/** The kinds that this tab looks at. */
let openKinds = "";
/** @type {Share | null} */
let share = null;
/** The stream of this tab; null where another one reads it. @type {Stream | null} */
let stream = null;
/** Whether this tab was hidden since its stream was live. */
let wasAbsent = false;
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
  share?.want([]);
  share = null;
  openKinds = "";
  refusals.clear();
  schedule();
}

/** Looks at what is wanted now; once for all components of a page. */
function schedule() {
  if (isScheduled) return;
  isScheduled = true;
  setTimeout(() => {
    isScheduled = false;
    look();
  }, 20);
}

function look() {
  const kinds = isPresent.value ? [...wanted].filter(([, count]) => count > 0).map(([kind]) => kind).sort() : [];
  if (kinds.join(",") === openKinds) return;
  openKinds = kinds.join(",");
  // Who goes to another page while the mesh is away still has to learn what changed meanwhile.
  if (!kinds.length && isPresent.value) connection.value = "";
  else if (connection.value !== "away") connection.value = "connecting";
  wasAbsent ||= !isPresent.value;
  const { name = "", tenant = "" } = caller.value ?? {};
  share ??= new Share(JSON.stringify([ROOT, name, tenant, VERSION]), { lead, rest, news, take });
  share.want(kinds);
  // Another tab, or this one, may have it already.
  if (share.isLeading && stream?.isLive) tellState("live");
}

// Immediately: a page that is left runs no timer.
isPresent.subscribe((is) => (is ? schedule() : look()));

/** Reads a stream of kinds, in the place of the one before. @param {string[]} kinds */
function lead(kinds) {
  rest();
  void follow(kinds, (stream = new Stream()));
}

function rest() {
  stream?.abort.abort();
  stream = null;
}

/** What this tab has of kinds, for another one. @param {string[]} kinds @returns {import("./live_share.js").News} */
function news(kinds) {
  const found = kinds.flatMap((kind) => {
    const problem = refusals.get(kind) ?? updates.problems.get(kind);
    return [
      ...[...(updates.maps.get(kind) ?? [])].map(([name, object]) => ({ kind, change: "put", name, object })),
      ...(updates.synced.has(kind) ? [{ kind, change: "synced" }] : []),
      ...(problem ? [{ kind, change: "unavailable", message: problem }] : []),
    ];
  });
  return { updates: found, state: connection.value, because: awayBecause.value };
}

/** Takes what the leading tab tells. @param {import("./live_share.js").News} news */
function take({ isNew, updates: changes = [], state, because = "" }) {
  if (isNew) begin(openKinds.split(","));
  for (const change of changes) updates.take(change);
  if (state) setState(state, because);
}

/** Begins with a new snapshot. @param {string[]} kinds */
function begin(kinds) {
  updates.end();
  updates = new Updates(kinds);
}

/** @param {string} state @param {string} because */
function setState(state, because = "") {
  if (because) awayBecause.value = because;
  if (state === "live") {
    if (connection.value === "away" || wasAbsent) comebacks.value += 1;
    wasAbsent = false;
  }
  connection.value = state;
}

/** @param {string} state @param {string} because */
function tellState(state, because = "") {
  if (connection.value === state && !because) return;
  setState(state, because);
  share?.tell({ state, because });
}

class Stream {
  abort = new AbortController();
  isLive = false;
}

/** Reads a stream for all tabs until it is aborted; begins again after every end. @param {string[]} kinds @param {Stream} own */
async function follow(kinds, own) {
  const { signal } = own.abort;
  let isAgain = false;
  for (let failures = 0; !signal.aborted; failures += 1) {
    const asked = kinds.filter((kind) => !refusals.has(kind));
    if (!asked.length) return tellState("");
    if (!isAgain) {
      begin(kinds);
      share?.tell({ isNew: true, state: connection.value });
    }
    isAgain = false;
    let because = "the stream ended";
    try {
      for await (const { data } of events("GET", "/api/v1/watch", { query: { kinds: asked.join(","), ...queryOf(asked) }, signal })) {
        failures = 0;
        own.isLive = true;
        tellState("live");
        if (data) give(JSON.parse(data));
      }
    } catch (error) {
      if (signal.aborted) return;
      const failure = error instanceof ApiError ? error : new ApiError(0, { message: String(error) });
      because = failure.message;
      isAgain = isRefused(asked, failure);
      if (isAgain) {
        failures = -1;
        continue;
      }
    }
    own.isLive = false;
    if (signal.aborted) return;
    // What came just before the end is shown too.
    updates.end();
    tellState("away", because);
    refusals.clear();
    await new Promise((resolve) => setTimeout(resolve, RETRY_MILLISECONDS[Math.min(failures, RETRY_MILLISECONDS.length - 1)]));
  }
}

/** @param {import("./live_share.js").Update & {error?: any}} update */
function give(update) {
  if (update.error) throw new ApiError(0, update.error);
  updates.take(update);
  share?.give(update);
}

/** Requests of all tenants, if the caller may name them. @param {string[]} kinds @returns {Record<string, string>} */
const queryOf = (kinds) => (kinds.includes("request") ? { allTenants: "true" } : {});

/** Whether the gateway refuses one of the kinds, which is not known to it or not for this key; that one has the refusal as its problem,
 * and the others are followed all the same. @param {string[]} kinds @param {ApiError} failure */
function isRefused(kinds, failure) {
  const refused = kinds[Number(/^kinds\[(\d+)\]$/.exec(failure.param)?.[1] ?? -1)];
  if (refused === undefined) return false;
  const message = failure.message.replace(`${failure.param}: `, "");
  refusals.set(refused, message);
  give({ kind: refused, change: "unavailable", message });
  return true;
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

  /** @param {import("./live_share.js").Update} update */
  take({ kind, change, name = "", object, message = "" }) {
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

  /** Shows the last changes. */
  end() {
    cancelAnimationFrame(this.frame);
    clearTimeout(this.frame);
    this.show();
  }
}

let updates = new Updates([]);
