// What the list of waiting requests has besides: the queues of all tenants, and the question before one is cancelled.
import { html, useState } from "../parts/html.js";
import { collection } from "../live.js";
import { can } from "../session.js";
import { Confirm } from "../parts/dialog.js";
import { count } from "../parts/format.js";
import { Table } from "../parts/table.js";
import { Bar } from "../parts/widgets.js";
import { sendCancel } from "./requests_words.js";

/** Asks before a request is cancelled. */
export function useCancel() {
  const [chosen, ask] = useState(/** @type {any} */ (null));
  const dialog =
    chosen &&
    html`<${Confirm} title="Cancel this request?" text=${html`<p><code>${chosen.requestId}</code> waits for ${chosen.target}. Its caller gets the error <code>cancelled</code>.</p>`}
      action="Cancel the request" isDangerous=${true} onClose=${() => ask(null)} onDo=${() => sendCancel(chosen.requestId)} />`;
  return { ask, dialog };
}

/** How many requests of all tenants wait for each name and run there. */
export function Queues() {
  const live = collection("queue").value;
  if (!can("operations:view")) return null;
  const rows = [...live.items].filter(([, queue]) => queue.waiting || queue.running).map(([name, queue]) => ({ name, ...queue }));
  if (!rows.length) return null;
  rows.sort((left, right) => right.waiting - left.waiting || left.name.localeCompare(right.name));
  return html`<section><h2>All tenants</h2>
    <${Table} label="Queues" rows=${rows} rowKey=${(/** @type {any} */ row) => row.name} height="24rem" columns=${COLUMNS} /></section>`;
}

/** @type {import("../parts/table.js").Column[]} */
const COLUMNS = [
  { title: "Model, pool or route", cell: (row) => row.name, sort: (row) => row.name },
  { title: "Waiting", className: "number", cell: (row) => count(row.waiting), sort: (row) => row.waiting },
  { title: "Limit", className: "number", cell: (row) => count(row.maxWaiting), hint: "maximum number of waiting requests" },
  { title: "Running", className: "number", cell: (row) => count(row.running), sort: (row) => row.running },
  {
    title: "Usage",
    cell: (row) => html`<${Bar} label=${`Queue of ${row.name}`} total=${row.maxWaiting} parts=${[{ name: "waiting", value: row.waiting, tone: row.waiting >= row.maxWaiting ? "bad" : "foreign", text: `${row.waiting} of ${row.maxWaiting}` }]} />`,
  },
];
