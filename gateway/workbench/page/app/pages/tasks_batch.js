// One batch: its progress, the lines that are wrong, its results, and what may be done with it.
import { html, useCallback, useEffect, useState } from "../parts/html.js";
import { get, lines, post, segment } from "../api.js";
import { address } from "../navigation.js";
import { can } from "../session.js";
import { clock, seconds } from "../parts/format.js";
import { attempt } from "../parts/notices.js";
import { Table } from "../parts/table.js";
import { ErrorNote, Facts, State } from "../parts/widgets.js";
import { download } from "../transfer.js";
import { textsOf } from "./tasks_answer.js";
import { BatchProgress, isUnfinished } from "./tasks_batches.js";
import { useTaskNews } from "./tasks_news.js";

/** Results that are shown; the file has all of them. */
const SHOWN_RESULTS = 100;

/** @param {{id: string}} props */
export function BatchDetail({ id }) {
  const path = `/v1/batches/${segment(id)}`;
  const [batch, setBatch] = useState(/** @type {any} */ (null));
  const [error, setError] = useState(/** @type {unknown} */ (null));
  const refresh = useCallback(
    () => get(path).then((found) => (setBatch(found), setError(null)), setError),
    [path],
  );
  useEffect(() => void refresh(), [refresh]);
  useTaskNews(refresh, isUnfinished(batch));
  const back = html`<p class="back"><a href=${address("tasks/batches")}>Batches</a></p>`;
  if (!batch) return html`${back}<h1 class="mono">${id}</h1><${ErrorNote} error=${error} />${!error && html`<p class="faint">Loading…</p>`}`;
  const cancel = () => attempt(() => post(`${path}/cancel`).then(setBatch), `${id} is being cancelled.`);
  const canBeCancelled = can("inference:edit") && ["in_progress", "finalizing"].includes(batch.status);
  return html`${back}
    <div class="row title"><h1 class="mono">${id}</h1><${State} value=${batch.status} />
      ${canBeCancelled && html`<button onClick=${cancel}>Cancel</button>`}</div>
    <${ErrorNote} error=${error} />
    <section class="panel"><p><${BatchProgress} batch=${batch} /></p><${Facts} facts=${facts(batch)} /></section>
    ${batch.errors &&
    html`<section class="panel"><h2>Errors</h2>
      <${Table} label="Errors" rows=${batch.errors.data} rowKey=${(/** @type {any} */ row) => `${row.line} ${row.code} ${row.message}`} columns=${ERRORS} height="40vh" /></section>`}
    <${Results} title="Results" fileId=${batch.output_file_id} name=${`${id}-results.jsonl`} />
    <${Results} title="Lines that failed" fileId=${batch.error_file_id} name=${`${id}-errors.jsonl`} />
    ${isUnfinished(batch) && html`<p class="faint">The result file is written when all lines have ended; until then, results are read from the tasks.</p>`}`;
}

/** @param {any} batch @returns {[string, any][]} */
function facts(batch) {
  const ended = batch.completed_at ?? batch.cancelled_at ?? batch.expired_at ?? batch.failed_at;
  return [
    ["Endpoint", batch.endpoint],
    ["Completed", batch.request_counts.completed],
    ["Failed", batch.request_counts.failed],
    ["Created", clock(batch.created_at * 1000)],
    ["Ended", ended && clock(ended * 1000)],
    ["Took", ended && seconds(ended - batch.created_at)],
    ["Completion window ends", isUnfinished(batch) && batch.expires_at && clock(batch.expires_at * 1000)],
    ["Input", html`<span class="mono">${batch.input_file_id}</span>`],
    .../** @type {[string, any][]} */ (Object.entries(batch.metadata ?? {}).map(([name, value]) => [`metadata: ${name}`, value])),
  ];
}

/** A file of results: to save it, and its first lines. @param {{title: string, fileId: string | null, name: string}} props */
function Results({ title, fileId, name }) {
  const [rows, setRows] = useState(/** @type {any[]} */ ([]));
  const [error, setError] = useState(/** @type {unknown} */ (null));
  const path = fileId ? `/v1/files/${segment(fileId)}/content` : "";
  useEffect(() => {
    const stop = new AbortController();
    if (path) firstLines(path, stop.signal).then(setRows, (failure) => stop.signal.aborted || setError(failure));
    return () => stop.abort();
  }, [path]);
  if (!path) return null;
  return html`<section class="panel"><div class="row"><h2>${title}</h2>
      <button onClick=${() => attempt(() => download(path, name))}>Download</button></div>
    ${rows.length >= SHOWN_RESULTS && html`<p class="faint">The first ${SHOWN_RESULTS}; the file has all.</p>`}
    <${Table} label=${title} rows=${rows} rowKey=${(/** @type {any} */ row) => row.id} columns=${RESULTS} height="50vh" empty="…" />
    <${ErrorNote} error=${error} /></section>`;
}

/** @param {string} path @param {AbortSignal} signal */
async function firstLines(path, signal) {
  const rows = [];
  for await (const line of lines("GET", path, { signal })) {
    if (line) rows.push(JSON.parse(line));
    if (rows.length >= SHOWN_RESULTS) break;
  }
  return rows;
}

/** @type {import("../parts/table.js").Column[]} */
const ERRORS = [
  { title: "Line", cell: (row) => row.line || "file", className: "number" },
  { title: "Error", cell: (row) => row.code },
  { title: "Why", cell: (row) => row.message, className: "wrap" },
];

/** @type {import("../parts/table.js").Column[]} */
const RESULTS = [
  { title: "custom_id", cell: (row) => row.custom_id },
  { title: "Status", cell: (row) => row.response?.status_code ?? "", className: "number" },
  { title: "Task", cell: (row) => row.response?.request_id && html`<a class="mono" href=${address(`tasks/${row.response.request_id}`)}>${row.response.request_id}</a>` },
  { title: "Answer", cell: (row) => row.error?.message ?? row.response?.body?.error?.message ?? textsOf(row.response?.body ?? {}).join(" · "), className: "wrap" },
];
