// The queue: who waits for what, at which position, for how long, and why; explained and cancelled in one click.
import { html, useMemo, useState } from "../parts/html.js";
import { collection, useLive } from "../live.js";
import { address } from "../navigation.js";
import { can } from "../session.js";
import { count, seconds } from "../parts/format.js";
import { Confirm } from "../parts/dialog.js";
import { post } from "../api.js";
import { Bar, Code, LiveNote, Progress, State } from "../parts/widgets.js";
import { Table } from "../parts/table.js";
import { useNow } from "./requests_timeline.js";
import { etaText, waits, waitText } from "./requests_words.js";

export function Page() {
  const seesQueues = can("operations:view");
  useLive("request", ...(seesQueues ? ["queue"] : []));
  const live = collection("request").value;
  const rows = useMemo(() => [...live.items.values()].filter(waits).sort(byTurn), [live]);
  const running = useMemo(() => [...live.items.values()].filter((request) => request.state === "running").length, [live]);
  const now = useNow(rows.length > 0);
  const [cancelled, setCancelled] = useState(/** @type {any} */ (null));
  return html`<h1>Queue</h1>
    <${LiveNote} live=${live} />
    ${live.isComplete &&
    html`<p class="faint" role="status">${count(rows.length)} waiting, ${count(running)} running.</p>
      <${Table} label="Waiting requests" rows=${rows} rowKey=${(/** @type {any} */ request) => request.requestId} columns=${columnsOf(now, setCancelled)} empty=${html`<${Empty} />`} />`}
    <p class="faint">Requests of your tenant. Positions count all tenants.</p>
    ${seesQueues && html`<${Queues} />`}
    <details><summary>CLI</summary><${Code} label="Commands" text=${"weft get requests -w\nweft explain ID\nweft cancel request ID"} /></details>
    ${cancelled &&
    html`<${Confirm} title="Cancel this request?" text=${html`<p><code>${cancelled.requestId}</code> waits for ${cancelled.target}. Its caller gets the error <code>cancelled</code>.</p>`}
      action="Cancel the request" isDangerous=${true} onClose=${() => setCancelled(null)}
      onDo=${() => post(`/v1/requests/${cancelled.requestId.split("/").map(encodeURIComponent).join("/")}/cancel`)} />`}`;
}

function Empty() {
  return html`No requests are waiting. Requests wait here for a free slot or a model load; running ones are under <a href=${address("requests")}>Requests</a>.`;
}

/** How many of all tenants wait for each name and run there, where any does. */
function Queues() {
  const live = collection("queue").value;
  const rows = [...live.items].filter(([, queue]) => queue.waiting || queue.running).map(([name, queue]) => ({ name, ...queue }));
  if (!rows.length) return null;
  rows.sort((left, right) => right.waiting - left.waiting || left.name.localeCompare(right.name));
  return html`<section><h2>All tenants</h2>
    <${Table} label="Queues" rows=${rows} rowKey=${(/** @type {any} */ row) => row.name} height="24rem" columns=${QUEUE_COLUMNS} /></section>`;
}

/** @type {import("../parts/table.js").Column[]} */
const QUEUE_COLUMNS = [
  { title: "Model, pool or route", cell: (row) => row.name, sort: (row) => row.name },
  { title: "Wait", className: "number", cell: (row) => count(row.waiting), sort: (row) => row.waiting },
  { title: "Limit", className: "number", cell: (row) => count(row.maxWaiting), hint: "maximum number of waiting requests" },
  { title: "Run", className: "number", cell: (row) => count(row.running), sort: (row) => row.running },
  {
    title: "Filled",
    cell: (row) => html`<${Bar} label=${`Queue of ${row.name}`} total=${row.maxWaiting} parts=${[{ name: "wait", value: row.waiting, tone: row.waiting >= row.maxWaiting ? "bad" : "foreign", text: `${row.waiting} of ${row.maxWaiting}` }]} />`,
  },
];

/** Those that wait for a load first, then by position, then by arrival. @param {any} left @param {any} right */
function byTurn(left, right) {
  const place = (/** @type {any} */ request) => request.queued?.position ?? 0;
  return left.target.localeCompare(right.target) || place(left) - place(right) || (left.arrivedAt < right.arrivedAt ? -1 : 1);
}

/** @param {number} now @param {(request: any) => void} onCancel @returns {import("../parts/table.js").Column[]} */
function columnsOf(now, onCancel) {
  return [
    { title: "Position", className: "number", cell: (request) => request.queued?.position ?? "", sort: (request) => request.queued?.position ?? 0 },
    { title: "Request", cell: (request) => html`<a class="mono" href=${address(`requests/${request.requestId}`)}>${request.requestId}</a>` },
    { title: "Model", cell: (request) => request.askedModel || request.target, sort: (request) => request.askedModel || request.target },
    { title: "State", cell: (request) => html`<${State} value=${request.state} />`, sort: (request) => request.state },
    { title: "Since", className: "number", cell: (request) => seconds(Math.max(1, Math.round((now - Date.parse(request.arrivedAt)) / 1000))), sort: (request) => -Date.parse(request.arrivedAt) },
    { title: "Starts in", className: "number", cell: etaText, sort: (request) => (request.queued ?? request.loading)?.etaSeconds ?? Infinity },
    { title: "Priority", cell: (request) => request.priority, sort: (request) => request.priority },
    { title: "Client", cell: (request) => request.clientId ?? "", sort: (request) => request.clientId ?? "" },
    { title: "Why", className: "wrap", cell: (request) => html`<${Why} request=${request} />` },
    {
      title: "Actions",
      cell: (request) => html`<span class="row"><a href=${address(`requests/${request.requestId}`)} aria-label=${`Explain ${request.requestId}`}>Explain</a>
        ${can("inference:edit") && html`<button aria-label=${`Cancel ${request.requestId}`} onClick=${() => onCancel(request)}>Cancel</button>`}</span>`,
    },
  ];
}

/** @param {{request: any}} props */
function Why({ request }) {
  const progress = request.loading?.progress;
  return html`${waitText(request)}${progress !== undefined && html` <${Progress} value=${progress} label=${`Load for ${request.requestId}`} />`}`;
}
