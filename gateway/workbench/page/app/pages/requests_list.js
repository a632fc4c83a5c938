// The list of requests: a tab per state, filters in the address, and new ones that come without moving what is read.
import { html, useMemo, useRef, useState } from "../parts/html.js";
import { address, go } from "../navigation.js";
import { count } from "../parts/format.js";
import { Table } from "../parts/table.js";
import { useNow } from "../parts/use_now.js";
import { Code, LiveNote } from "../parts/widgets.js";
import { endedColumns, waitingColumns } from "./requests_columns.js";
import { Queues, useCancel } from "./requests_queue.js";
import { byTurn, isFailed, modelOf, outcomeOf, tookSoFar, waits } from "./requests_words.js";

/** The tabs. @type {[string, string][]} */
const TABS = [["", "All"], ["running", "Running"], ["waiting", "Waiting"], ["ended", "Ended"]];
/** Parts of the tab "Ended". @type {Record<string, string>} */
const OUTCOMES = { ended: "All", completed: "Completed", failed: "Failed or refused", cancelled: "Cancelled" };
/** What each state has. @type {Record<string, (request: any) => boolean>} */
const SELECTIONS = {
  running: (request) => request.state === "running",
  waiting: waits,
  ended: (request) => request.state === "ended",
  completed: (request) => outcomeOf(request) === "completed",
  failed: isFailed,
  cancelled: (request) => outcomeOf(request) === "cancelled",
};
/** Seconds since their arrival. */
const TIMES = { "": "Any time", 300: "Last 5 min", 900: "Last 15 min", 3600: "Last hour", 86400: "Last 24 h" };
const FIELDS = ["state", "model", "tenant", "since", "text"];

/** @typedef {{state: string, model: string, tenant: string, since: string, text: string}} Chosen */

/** @param {{live: import("../live.js").Collection, query: URLSearchParams}} props */
export function RequestList({ live, query }) {
  const chosen = /** @type {Chosen} */ (Object.fromEntries(FIELDS.map((name) => [name, query.get(name) ?? ""])));
  const all = useMemo(() => [...live.items.values()], [live]);
  const now = useNow(all.some((request) => request.state !== "ended"));
  const filter = JSON.stringify(chosen);
  const matching = useMemo(() => all.filter((request) => matches(request, chosen, now)).sort(chosen.state === "waiting" ? byTurn : byArrival), [live, filter, now]);
  const { rows, newer, onAway, showNewer, box } = useStill(matching, live.items, filter);
  const longest = rows.reduce((most, request) => Math.max(most, tookSoFar(request, now)), 0);
  const { ask, dialog } = useCancel();
  const hasTenants = new Set(all.map((request) => request.tenant)).size > 1;
  const columns = chosen.state === "waiting" ? waitingColumns({ now, hasTenants, onCancel: ask }) : endedColumns({ now, longest, hasTenants, areFailed: chosen.state === "failed" });
  const isFiltered = FIELDS.some((name) => chosen[/** @type {keyof Chosen} */ (name)]);
  return html`<h1>Requests</h1>
    <${Tabs} all=${all} chosen=${chosen} />
    <${Filters} all=${all} chosen=${chosen} />
    <${LiveNote} live=${live} />
    ${live.isComplete &&
    html`<div class="row tools steady"><span class="faint" role="status">${count(all.filter(waits).length)} waiting, ${count(all.filter(SELECTIONS.running).length)} running, ${count(rows.length)} shown</span>
        ${newer > 0 && html`<button onClick=${showNewer}>${newer === 1 ? "Show 1 new request" : `Show ${count(newer)} new requests`}</button>`}</div>
      <div ref=${box}><${Table} label="Requests" rows=${rows} rowKey=${(/** @type {any} */ request) => request.requestId} columns=${columns} height="max(18rem, 100vh - 21rem)" onAway=${onAway}
        onOpen=${(/** @type {any} */ request) => go(`requests/${request.requestId}`)} empty=${emptyText(chosen.state, isFiltered)} /></div>`}
    <p class="faint">The last 1,000 ended requests are listed.${chosen.state === "waiting" && " Positions count all tenants."}</p>
    ${chosen.state === "waiting" && html`<${Queues} /><details><summary>CLI</summary><${Code} label="Commands" text=${"weft get requests -w\nweft explain ID\nweft cancel request ID"} /></details>`}
    ${dialog}`;
}

/** @param {string} state @param {boolean} isFiltered */
function emptyText(state, isFiltered) {
  if (state === "waiting") return html`No requests are waiting. Running ones are under <a href=${address("requests", { state: "running" })}>Running</a>.`;
  if (isFiltered) return "No request matches the filter.";
  return html`No requests yet. Send one with <a href=${address("chat")}>Chat</a> or <code>weft chat MODEL -m "…"</code>.`;
}

/** @param {{all: any[], chosen: Chosen}} props */
function Tabs({ all, chosen }) {
  const current = chosen.state in OUTCOMES ? "ended" : chosen.state;
  return html`<nav class="tabs" aria-label="States">${TABS.map(([state, title]) => {
    const number = state === "running" || state === "waiting" ? ` (${count(all.filter(SELECTIONS[state]).length)})` : "";
    return html`<a key=${state} href=${address("requests", { ...chosen, state })} aria-current=${state === current ? "page" : undefined}>${title}${number}</a>`;
  })}</nav>`;
}

/** @param {{all: any[], chosen: Chosen}} props */
function Filters({ all, chosen }) {
  /** @param {Partial<Chosen>} change */
  const set = (change) => go("requests", { ...chosen, ...change }, { replace: true });
  const models = namesOf(all.map(modelOf), chosen.model);
  const tenants = namesOf(all.map((request) => request.tenant), chosen.tenant);
  return html`<div class="row tools">
    ${chosen.state in OUTCOMES && html`<${Choice} label="Outcome" value=${chosen.state} options=${Object.entries(OUTCOMES)} onChoose=${(/** @type {string} */ state) => set({ state })} />`}
    <${Choice} label="Model" value=${chosen.model} options=${[["", "All"], ...models.map((name) => [name, name])]} onChoose=${(/** @type {string} */ model) => set({ model })} />
    ${tenants.length > 1 &&
    html`<${Choice} label="Tenant" value=${chosen.tenant} options=${[["", "All"], ...tenants.map((name) => [name, name])]} onChoose=${(/** @type {string} */ tenant) => set({ tenant })} />`}
    <${Choice} label="Arrived" value=${chosen.since} options=${Object.entries(TIMES)} onChoose=${(/** @type {string} */ since) => set({ since })} />
    <label class="inline">Find <input type="search" value=${chosen.text} placeholder="id, model, client, runner" spellcheck=${false}
      onInput=${(/** @type {any} */ event) => set({ text: event.target.value })} /></label></div>`;
}

/** @param {{label: string, value: string, options: [string, string][], onChoose: (value: string) => void}} props */
function Choice({ label, value, options, onChoose }) {
  return html`<label class="inline">${label} <select value=${value} onChange=${(/** @type {any} */ event) => onChoose(event.target.value)}>
    ${options.map(([each, title]) => html`<option key=${each} value=${each}>${title}</option>`)}</select></label>`;
}

/** Different names in order, the chosen one among them. @param {string[]} names @param {string} chosen */
const namesOf = (names, chosen) => [...new Set(chosen ? [...names, chosen] : names)].sort((left, right) => left.localeCompare(right));

/** @param {any} request @param {Chosen} chosen @param {number} now */
function matches(request, { state, model, tenant, since, text }, now) {
  if (state && !SELECTIONS[state]?.(request)) return false;
  if ((model && modelOf(request) !== model) || (tenant && request.tenant !== tenant)) return false;
  if (since && Date.parse(request.arrivedAt) < now - 1000 * Number(since)) return false;
  return !text || textOf(request).includes(text.toLowerCase());
}

/** What a search looks at. @param {any} request */
function textOf(request) {
  const attempts = request.receipt?.attempts ?? [];
  const runners = attempts.map((/** @type {any} */ attempt) => attempt.runner);
  return [request.requestId, request.target, request.askedModel, request.clientId, request.receipt?.model, ...runners].filter(Boolean).join(" ").toLowerCase();
}

/** The newest first. @param {any} left @param {any} right */
const byArrival = (left, right) => (left.arrivedAt < right.arrivedAt ? 1 : -1);

/** Keeps the rows of a reader who has scrolled down: they change in place, and those that would come between them are counted.
 * @param {any[]} matching @param {Map<string, any>} items @param {string} filter of what is listed */
function useStill(matching, items, filter) {
  const [still, setStill] = useState(/** @type {{filter: string, ids: Set<string>} | null} */ (null));
  const box = useRef(/** @type {HTMLElement | null} */ (null));
  const ids = still?.filter === filter ? still.ids : null;
  const onAway = (/** @type {boolean} */ isAway) => {
    if (isAway === (ids !== null)) return;
    setStill(isAway ? { filter, ids: new Set(matching.map((request) => request.requestId)) } : null);
  };
  const showNewer = () => {
    box.current?.querySelector(".scroll")?.scrollTo(0, 0);
    setStill(null);
  };
  const rows = ids ? [...ids].flatMap((id) => items.get(id) ?? []) : matching;
  const newer = ids ? matching.filter((request) => !ids.has(request.requestId)).length : 0;
  return { rows, newer, onAway, showNewer, box };
}
