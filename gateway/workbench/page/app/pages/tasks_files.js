// The files of batches: what was sent, what came out, uploads and downloads.
import { html, useEffect, useRef, useState } from "../parts/html.js";
import { get, remove, segment } from "../api.js";
import { address } from "../navigation.js";
import { can } from "../session.js";
import { Confirm, Dialog } from "../parts/dialog.js";
import { bytes, clock, words } from "../parts/format.js";
import { attempt, notify } from "../parts/notices.js";
import { PageEnd, usePages } from "../parts/paged.js";
import { Table } from "../parts/table.js";
import { ErrorNote, Progress } from "../parts/widgets.js";
import { download } from "../transfer.js";
import { FileChoice, isSound, sendFile } from "./tasks_file_choice.js";

const PAGE_SIZE = 200;

export function FileList() {
  const [isUploading, setUploading] = useState(false);
  const [deleted, setDeleted] = useState(/** @type {any} */ (null));
  const list = usePages(async (after, size) => {
    const page = await get("/v1/files", { limit: size, after });
    return { items: page.data, next: page.has_more ? page.last_id : "" };
  }, "files", { size: PAGE_SIZE, most: 10_000 });
  const path = (/** @type {any} */ file) => `/v1/files/${segment(file.id)}`;
  const actions = (/** @type {any} */ file) => html`<span class="row">
    <button onClick=${() => attempt(() => download(`${path(file)}/content`, file.filename))} aria-label=${`Download ${file.filename}`}>Download</button>
    ${file.purpose === "batch" && can("inference:create") && html`<a href=${address("tasks/batches", { file: file.id })} aria-label=${`Start a batch from ${file.filename}`}>Batch</a>`}
    ${can("inference:edit") && html`<button onClick=${() => setDeleted(file)} aria-label=${`Delete ${file.filename}`}>Delete</button>`}</span>`;
  return html`<div class="row tools"><span class="fill faint">Requests and results of batches. They are deleted when they expire.</span>
      ${can("inference:create") && html`<button class="main" onClick=${() => setUploading(true)}>Upload</button>`}</div>
    ${list.isComplete &&
    html`<${Table} label="Files" rows=${list.rows} rowKey=${(/** @type {any} */ file) => file.id} columns=${[...COLUMNS, { title: "Actions", cell: actions }, ID]}
      empty="No files yet. Upload one with a request per line, then start a batch." />`}
    <${PageEnd} list=${list} />
    ${isUploading && html`<${Upload} onClose=${() => setUploading(false)} onDone=${list.refresh} />`}
    ${deleted &&
    html`<${Confirm} title="Delete this file?" text=${`${deleted.filename} (${bytes(deleted.bytes)}) is deleted and cannot be read any more.`} action="Delete" isDangerous=${true}
      onDo=${() => remove(path(deleted)).then(() => list.drop(deleted.id))} onClose=${() => setDeleted(null)} />`}`;
}

/** @param {{onClose: () => void, onDone: () => void}} props */
function Upload({ onClose, onDone }) {
  const [choice, setChoice] = useState(/** @type {import("./tasks_file_choice.js").Choice | null} */ (null));
  const [share, setShare] = useState(/** @type {number | null} */ (null));
  const [error, setError] = useState(/** @type {unknown} */ (null));
  const stop = useRef(new AbortController());
  useEffect(() => () => stop.current.abort(), []);
  /** @param {Event} event */
  const submit = async (event) => {
    event.preventDefault();
    setError(null);
    setShare(0);
    try {
      const file = await sendFile(/** @type {File} */ (choice?.file), setShare, stop.current.signal);
      notify(`${file.filename} is stored as ${file.id}.`);
      onDone();
      onClose();
    } catch (failure) {
      setError(failure);
      setShare(null);
    }
  };
  return html`<${Dialog} title="Upload a file of requests" onClose=${onClose} isWide=${true}>
    <form onSubmit=${submit}>
      <${FileChoice} choice=${choice} onChoice=${setChoice} />
      ${share !== null && html`<p role="status">Sending… <${Progress} value=${share} label="Sent" /></p>`}
      <${ErrorNote} error=${error} />
      <div class="buttons"><button type="button" onClick=${onClose}>Cancel</button>
        <button type="submit" class="main" disabled=${!isSound(choice) || share !== null}>Upload</button></div>
    </form>
  </${Dialog}>`;
}

/** @type {import("../parts/table.js").Column[]} */
const COLUMNS = [
  { title: "Name", cell: (file) => html`<span class="cut" title=${file.filename}>${file.filename}</span>`, sort: (file) => file.filename },
  { title: "What", cell: (file) => words(file.purpose), sort: (file) => file.purpose },
  { title: "Size", cell: (file) => bytes(file.bytes), sort: (file) => file.bytes, className: "number" },
  { title: "Created", cell: (file) => clock(file.created_at * 1000), sort: (file) => file.created_at },
  { title: "Expires", cell: (file) => new Date(file.expires_at * 1000).toLocaleDateString() },
];
/** @type {import("../parts/table.js").Column} */
const ID = { title: "Id", cell: (file) => html`<span class="mono">${file.id}</span>` };
