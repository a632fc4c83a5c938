// Durable work: tasks, batches and the files of batches, as tabs of one page.
import { html } from "../parts/html.js";
import { address } from "../navigation.js";
import { TaskList } from "./tasks_list.js";
import { TaskDetail } from "./tasks_detail.js";
import { BatchList } from "./tasks_batches.js";
import { BatchDetail } from "./tasks_batch.js";
import { FileList } from "./tasks_files.js";

const TABS = [
  { path: "tasks", title: "Tasks" },
  { path: "tasks/batches", title: "Batches" },
  { path: "tasks/files", title: "Files" },
];

/** @param {{name: string, query: URLSearchParams}} props */
export function Page({ name, query }) {
  const [tab, id = ""] = name.split("/");
  if (tab === "batches" && id) return html`<${BatchDetail} key=${id} id=${id} />`;
  if (tab === "batches") return html`<${Tabs} current="tasks/batches" /><${BatchList} query=${query} />`;
  if (tab === "files") return html`<${Tabs} current="tasks/files" /><${FileList} />`;
  if (tab) return html`<${TaskDetail} key=${tab} id=${tab} />`;
  return html`<${Tabs} current="tasks" /><${TaskList} query=${query} />`;
}

/** @param {{current: string}} props */
function Tabs({ current }) {
  return html`<h1>Tasks</h1>
    <nav class="tabs" aria-label="Durable work">
      ${TABS.map(({ path, title }) => html`<a key=${path} href=${address(path)} aria-current=${path === current ? "page" : undefined}>${title}</a>`)}
    </nav>`;
}
