// The list of tasks: the newest first, by state, with those that come and change while it is shown.
import { html, useState } from "../parts/html.js";
import { get } from "../api.js";
import { address, go } from "../navigation.js";
import { can } from "../session.js";
import { clock, seconds } from "../parts/format.js";
import { PageEnd, usePages } from "../parts/paged.js";
import { CommittedText } from "../parts/fields.js";
import { Table } from "../parts/table.js";
import { State } from "../parts/widgets.js";
import { NewTask } from "./tasks_new.js";
import { useTaskNews } from "./tasks_news.js";

const STATES = ["pending", "running", "completed", "failed", "cancelled"];
const PAGE_SIZE = 100;
const MAX_PAGE_SIZE = 1000;

/** @param {{query: URLSearchParams}} props */
export function TaskList({ query }) {
  const state = query.get("state") ?? "";
  const model = query.get("model") ?? "";
  const [isNew, setNew] = useState(false);
  const [notice, setNotice] = useState("");
  const list = usePages(
    async (after, size) => {
      const page = await get("/api/v1/inference-tasks", { state, model, limit: size, page_token: after });
      setNotice(page.notice ?? "");
      return { items: page.data, next: page.next_page_token ?? "" };
    },
    `${state} ${model}`,
    { size: PAGE_SIZE, most: MAX_PAGE_SIZE },
  );
  useTaskNews(list.refresh);
  /** @param {Record<string, string>} change */
  const filter = (change) => go("tasks", { state, model, ...change }, { replace: true });
  return html`<div class="row tools">
      <label class="inline">State <select value=${state} onChange=${(/** @type {any} */ event) => filter({ state: event.target.value })}>
        <option value="">all</option>${STATES.map((each) => html`<option key=${each} value=${each}>${each}</option>`)}</select></label>
      <${CommittedText} label="Model" value=${model} onCommit=${(/** @type {string} */ wanted) => filter({ model: wanted })} />
      <span class="fill"></span>
      ${can("inference:create") && html`<button class="main" onClick=${() => setNew(true)}>New task</button>`}
    </div>
    ${notice && html`<p class="problem" role="alert">${notice}</p>`}
    ${list.isComplete &&
    html`<${Table} label="Tasks" rows=${list.rows} rowKey=${(/** @type {any} */ task) => task.id} empty=${state || model ? "No task matches the filter." : html`<${Empty} />`} columns=${COLUMNS} />`}
    <${PageEnd} list=${list} />
    ${isNew && html`<${NewTask} onClose=${() => setNew(false)} />`}`;
}

function Empty() {
  return html`No tasks yet. A task is a durable request: it completes even if its caller disconnects or the mesh restarts. Submit one here or with ${" "}
    <code>weft chat MODEL --async -m "…"</code>.`;
}

/** How long a task ran, once it has ended. @param {any} task */
export function taskDuration({ started_at: start, ended_at: end }) {
  return start && end ? seconds((Date.parse(end) - Date.parse(start)) / 1000) : "";
}

/** Why a task waits, or how it failed. @param {any} task */
const reason = (task) => task.error?.message ?? (task.state === "pending" ? task.waiting_for : "") ?? "";

/** @type {import("../parts/table.js").Column[]} */
const COLUMNS = [
  { title: "Task", cell: (task) => html`<a class="mono" href=${address(`tasks/${task.id}`)}>${task.id}</a>` },
  { title: "State", cell: (task) => html`<${State} value=${task.state} />`, sort: (task) => task.state },
  { title: "Model", cell: (task) => task.model, sort: (task) => task.model },
  { title: "Created", cell: (task) => clock(task.created_at), sort: (task) => task.created_at },
  { title: "Took", cell: taskDuration, className: "number" },
  { title: "Attempt", cell: (task) => `${task.attempt}/${task.max_attempts}`, className: "number", sort: (task) => task.attempt },
  { title: "Why", cell: reason, className: "wrap" },
];
