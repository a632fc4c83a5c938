// Operations: loads, unloads, pulls and flushes, live, with those that ended; and the audit log.
import { html } from "../parts/html.js";
import { collection, useLive } from "../live.js";
import { address, go } from "../navigation.js";
import { actor, ago, bytes, clock, words } from "../parts/format.js";
import { hasEnded, idOf, OperationNote, outcomeOf, titleOf } from "../parts/operations.js";
import { Table } from "../parts/table.js";
import { Facts, LiveNote, State } from "../parts/widgets.js";
import { Audit } from "./operations_audit.js";

const STATES = ["succeeded", "failed", "cancelled"];

/** @param {{name: string, query: URLSearchParams}} props */
export function Page({ name, query }) {
  useLive("operation");
  const live = collection("operation").value;
  if (name && name !== "audit") return html`<${Detail} id=${name} live=${live} />`;
  return html`<h1>Operations</h1>
    <nav class="tabs" aria-label="Operations">
      <a href=${address("operations")} aria-current=${name ? undefined : "page"}>Operations</a>
      <a href=${address("operations/audit")} aria-current=${name ? "page" : undefined}>Audit log</a>
    </nav>
    ${name ? html`<${Audit} operations=${live} />` : html`<${List} live=${live} state=${query.get("state") ?? ""} />`}`;
}

/** @param {{live: import("../live.js").Collection, state: string}} props */
function List({ live, state }) {
  const all = [...live.items.values()].sort((left, right) => (right.createdAt ?? "").localeCompare(left.createdAt ?? ""));
  const underway = all.filter((each) => !hasEnded(each));
  const ended = all.filter(hasEnded);
  const rows = state ? ended.filter((each) => each.state === state) : ended;
  return html`<${LiveNote} live=${live} />
    ${underway.length > 0 &&
    html`<section class="panel operations" aria-label="Running"><h2>Running</h2>
      ${underway.map((each) => html`<${OperationNote} key=${each.name} operation=${each} />`)}</section>`}
    ${live.isComplete &&
    html`<div class="row tools">
        <label class="inline">State <select value=${state} onChange=${(/** @type {any} */ event) => go("operations", { state: event.target.value }, { replace: true })}>
          <option value="">all (${ended.length})</option>
          ${STATES.map((each) => html`<option key=${each} value=${each}>${each} (${ended.filter((one) => one.state === each).length})</option>`)}
        </select></label>
        <span class="faint" role="status">${rows.length} of ${ended.length} that ended</span>
      </div>
      <${Table} label="Operations" rows=${rows} rowKey=${(/** @type {any} */ row) => row.name} columns=${COLUMNS} height="calc(100vh - 14rem)"
        onOpen=${(/** @type {any} */ row) => go(`operations/${idOf(row)}`)}
        empty=${ended.length ? "No operation matches the filter." : html`No operation has ended yet. <a href=${address("models")}>Load a model</a>.`} />`}`;
}

/** @type {import("../parts/table.js").Column[]} */
const COLUMNS = [
  { title: "Operation", cell: (row) => html`<a href=${address(`operations/${idOf(row)}`)}>${titleOf(row)}</a>`, sort: titleOf, className: "long" },
  { title: "State", cell: (row) => html`<${State} value=${row.state} />`, sort: (row) => row.state },
  { title: "Outcome", cell: (row) => (row.state === "succeeded" ? outcomeOf(row) : row.detail || words(row.reason)), className: "long" },
  { title: "Runner", cell: (row) => row.runner || "–", sort: (row) => row.runner ?? "" },
  { title: "Requested by", cell: (row) => actor(row.requestedBy) || "–", sort: (row) => actor(row.requestedBy), className: "long" },
  { title: "Ended", cell: (row) => html`<span title=${clock(row.endedAt)}>${ago(row.endedAt)}</span>`, sort: (row) => row.endedAt ?? "" },
];

/** @param {{id: string, live: import("../live.js").Collection}} props */
function Detail({ id, live }) {
  const found = live.items.get(`operations/${id}`);
  return html`<p class="back"><a href=${address("operations")}>Operations</a></p>
    <h1 class="mono">${id}</h1>
    <${LiveNote} live=${live} />
    ${live.isComplete && !found && html`<p class="faint">It is neither running nor among the newest 100 operations.</p>`}
    ${found &&
    html`<section class="panel"><${OperationNote} operation=${found} /></section>
      <section class="panel"><${Facts} facts=${factsOf(found)} /></section>`}`;
}

/** @param {any} operation @returns {[string, any][]} */
function factsOf(operation) {
  const { type, ...settings } = operation.action;
  const given = Object.entries(settings).filter(([, value]) => ["string", "number", "boolean"].includes(typeof value) && value !== "");
  return [
    ["Action", type],
    ...given.map(([name, value]) => /** @type {[string, any]} */ ([name, String(value)])),
    ["Runner", operation.runner],
    ["Requested by", actor(operation.requestedBy)],
    ["Signed by", (operation.signers ?? []).join(", ")],
    ["Request", operation.requestId],
    ["Accepted", clock(operation.createdAt)],
    ["Begun", clock(operation.startedAt)],
    ["Ended", clock(operation.endedAt)],
    ["Reason", words(operation.reason)],
    ["Memory", bytes(operation.result?.memoryBytes)],
  ];
}
