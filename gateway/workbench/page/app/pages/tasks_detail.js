// One task: its state as it changes, its answer as it comes, its attempts, its journal, and what may be done with it.
import { html, useEffect, useState } from "../parts/html.js";
import { get, post, remove, segment } from "../api.js";
import { address, go } from "../navigation.js";
import { pageOf } from "../page_table.js";
import { can } from "../session.js";
import { Confirm } from "../parts/dialog.js";
import { clock } from "../parts/format.js";
import { attempt } from "../parts/notices.js";
import { RetryText } from "../parts/retry.js";
import { Table } from "../parts/table.js";
import { ErrorNote, Facts, State } from "../parts/widgets.js";
import { taskDuration } from "./tasks_list.js";
import { ENDED, MAX_JOURNAL, useTaskEvents } from "./tasks_events.js";
import { Answer } from "./tasks_answer.js";

/** @param {{id: string}} props */
export function TaskDetail({ id }) {
  const path = `/api/v1/inference-tasks/${segment(id)}`;
  const [task, setTask] = useState(/** @type {any} */ (null));
  const [error, setError] = useState(/** @type {unknown} */ (null));
  const [isJournalShown, setJournalShown] = useState(false);
  const [isDeleting, setDeleting] = useState(false);
  const [webhook, setWebhook] = useState(/** @type {any} */ (null));
  const isEnded = ENDED.has(task?.state);
  const news = useTaskEvents(task && (!isEnded || isJournalShown) ? path : "");
  const newest = news.task && !isEnded ? { ...task, ...news.task } : task;
  // What events lack: the attempts, and at its end the result.
  const version = news.task ? `${news.task.state} ${news.task.attempt}` : "";
  useEffect(() => {
    const stop = new AbortController();
    get(path, {}, stop.signal).then(setTask, (failure) => stop.signal.aborted || setError(failure));
    return () => stop.abort();
  }, [path, version]);

  useEffect(() => {
    if (isEnded) get(`/v1/admin/tasks/${segment(id)}`).then((found) => setWebhook(found.webhook ?? null), () => {});
  }, [id, isEnded]);

  const back = html`<p class="back"><a href=${address("tasks")}>Tasks</a></p>`;
  if (!newest) return html`${back}<h1 class="mono">${id}</h1><${ErrorNote} error=${error} />${!error && html`<p class="faint">Loading…</p>`}`;
  const cancel = () => attempt(() => post(`${path}/cancel`), `${id} is being cancelled.`);
  const forget = () => remove(`${path}?forget=true`).then(() => go("tasks"));
  return html`${back}
    <div class="row title"><h1 class="mono">${id}</h1><${State} value=${newest.state} />
      ${pageOf("requests") && html`<a href=${address(`requests/${id}`)}>Explain</a>`}
      ${can("inference:edit") && !isEnded && html`<button onClick=${cancel}>Cancel</button>`}
      ${can("inference:edit") && isEnded && html`<button onClick=${() => setDeleting(true)}>Delete</button>`}</div>
    <${ErrorNote} error=${error} />
    ${newest.error && html`<p class="problem" role="alert">${newest.error.message} <span class="faint">${newest.error.code}</span></p>`}
    ${newest.state === "pending" && newest.waiting_for && html`<p role="status">Waiting: ${newest.waiting_for}</p>`}
    <section class="panel"><${Facts} facts=${facts(newest)} /></section>
    <section class="panel"><h2>Answer</h2><${Answer} task=${newest} text=${news.text} reasoning=${news.reasoning} /></section>
    <section class="panel"><h2>Attempts</h2>
      <${Table} label="Attempts" rows=${newest.attempts ?? []} rowKey=${(/** @type {any} */ row) => String(row.attempt)} columns=${ATTEMPTS}
        empty=${isEnded ? "It ended without an attempt." : "None yet; waiting for a slot."} /></section>
    ${webhook &&
    html`<section class="panel"><h2>Webhook</h2>
      <p><span class="mono">${webhook.type}</span> <${State} value=${webhook.state} />
        ${webhook.nextAt && ` Next attempt: ${clock(webhook.nextAt)}.`} ${webhook.error?.message}</p>
      <${Table} label="Webhook attempts" rows=${webhook.attempts} rowKey=${(/** @type {any} */ row) => row.startedAt} columns=${DELIVERIES} empty="None yet." /></section>`}
    <section class="panel"><details open=${isJournalShown} onToggle=${(/** @type {any} */ event) => setJournalShown(event.target.open)}>
      <summary><h2>Journal</h2></summary>
      <p class="faint">What is on disk of this task: its changes and the pieces of its answer, by their numbers.
        ${news.journal.length >= MAX_JOURNAL && ` The last ${MAX_JOURNAL}.`}</p>
      <${Table} label="Journal" rows=${news.journal} rowKey=${(/** @type {any} */ row) => row.key} columns=${JOURNAL} height="40vh" empty="Nothing yet." />
      <${ErrorNote} error=${news.error} /></details></section>
    ${isDeleting &&
    html`<${Confirm} title="Delete this task?" text="Its request and its answer are deleted. This cannot be undone." action="Delete" isDangerous=${true}
      onDo=${forget} onClose=${() => setDeleting(false)} />`}`;
}

/** @param {any} task @returns {[string, any][]} */
function facts(task) {
  const { batch, metadata = {} } = task;
  return [
    ["Model", task.model],
    ["Endpoint", task.endpoint],
    ["Created", clock(task.created_at)],
    ["Started", clock(task.started_at)],
    ["Ended", clock(task.ended_at)],
    ["Took", taskDuration(task)],
    ["Queue timeout at", ENDED.has(task.state) ? "" : clock(task.expires_at)],
    ["Attempt", `${task.attempt} of ${task.max_attempts}`],
    ["Retry", task.retry && html`<${RetryText} retry=${task.retry} most=${task.max_attempts} />`],
    ["Submitted by", task.caller],
    ["User", task.user],
    ["Request", task.request_id && html`<span class="mono">${task.request_id}</span> (journaled)`],
    ["Batch", batch && html`<a class="mono" href=${address(`tasks/batches/${batch}`)}>${batch}</a>`],
    .../** @type {[string, any][]} */ (Object.entries(metadata).map(([name, value]) => [`metadata: ${name}`, value])),
  ];
}

/** @type {import("../parts/table.js").Column[]} */
const ATTEMPTS = [
  { title: "Attempt", cell: (row) => row.attempt },
  { title: "Began", cell: (row) => clock(row.claimed_at) },
  { title: "Ended", cell: (row) => clock(row.ended_at) },
  { title: "Took", cell: (row) => taskDuration({ started_at: row.claimed_at, ended_at: row.ended_at }), className: "number" },
  { title: "Error", cell: (row) => (row.error ? `${row.error.message} (${row.error.code})` : ""), className: "wrap" },
];

/** @type {import("../parts/table.js").Column[]} */
const DELIVERIES = [
  { title: "Began", cell: (row) => clock(row.startedAt) },
  { title: "Error", cell: (row) => (row.error ? `${row.error.message} (${row.error.reason})` : "Accepted"), className: "wrap" },
];

/** @type {import("../parts/table.js").Column[]} */
const JOURNAL = [
  { title: "Attempt", cell: (row) => row.attempt },
  { title: "Event", cell: (row) => row.number },
  { title: "What", cell: (row) => row.what },
  { title: "Text", cell: (row) => row.text, className: "wrap" },
];
