// The list of batches: the newest first, with the progress of those that run.
import { html, useState } from "../parts/html.js";
import { get } from "../api.js";
import { address } from "../navigation.js";
import { can } from "../session.js";
import { clock } from "../parts/format.js";
import { PageEnd, usePages } from "../parts/paged.js";
import { Table } from "../parts/table.js";
import { Bar, State } from "../parts/widgets.js";
import { useTaskNews } from "./tasks_news.js";
import { NewBatch } from "./tasks_new_batch.js";

const PAGE_SIZE = 100;
const UNFINISHED = new Set(["in_progress", "cancelling", "finalizing"]);

/** Whether a batch still changes. @param {any} batch */
export const isUnfinished = (batch) => UNFINISHED.has(batch?.status);

/** @param {{query: URLSearchParams}} props */
export function BatchList({ query }) {
  const file = query.get("file") ?? "";
  const [isNew, setNew] = useState(Boolean(file));
  const list = usePages(async (after, size) => {
    const page = await get("/v1/batches", { limit: size, after });
    return { items: page.data, next: page.has_more ? page.last_id : "" };
  }, "batches", { size: PAGE_SIZE, most: PAGE_SIZE });
  useTaskNews(list.refresh, list.rows.some(isUnfinished));
  return html`<div class="row tools"><span class="fill faint">A file of requests and a file of answers; each line is a task.</span>
      ${can("inference:create") && html`<button class="main" onClick=${() => setNew(true)}>New batch</button>`}</div>
    ${list.isComplete &&
    html`<${Table} label="Batches" rows=${list.rows} rowKey=${(/** @type {any} */ batch) => batch.id} columns=${COLUMNS}
      empty=${html`No batch yet. A batch is a file with one request per line: start one here or with <code>weft batch submit requests.jsonl</code>.`} />`}
    <${PageEnd} list=${list} />
    ${isNew && html`<${NewBatch} file=${file} onClose=${() => setNew(false)} />`}`;
}

/** How many lines have ended, and how. @param {{batch: any}} props */
export function BatchProgress({ batch }) {
  const { total, completed, failed } = batch.request_counts;
  const parts = [
    { name: "completed", value: completed, tone: "reserved" },
    { name: "failed", value: failed, tone: "bad" },
  ];
  return html`<span class="progress"><${Bar} label="Lines" total=${total} parts=${parts} /><span>${completed + failed} / ${total}</span></span>`;
}

/** @type {import("../parts/table.js").Column[]} */
const COLUMNS = [
  { title: "Batch", cell: (batch) => html`<a class="mono" href=${address(`tasks/batches/${batch.id}`)}>${batch.id}</a>` },
  { title: "State", cell: (batch) => html`<${State} value=${batch.status} />`, sort: (batch) => batch.status },
  { title: "Lines", cell: (batch) => html`<${BatchProgress} batch=${batch} />` },
  { title: "Failed", cell: (batch) => batch.request_counts.failed || "", className: "number" },
  { title: "Endpoint", cell: (batch) => batch.endpoint },
  { title: "Created", cell: (batch) => clock(batch.created_at * 1000), sort: (batch) => batch.created_at },
];
