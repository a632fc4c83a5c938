// The form that begins a batch: of a file of this machine, which is checked and sent, or of one that the mesh has.
import { html, useEffect, useRef, useState } from "../parts/html.js";
import { get, post } from "../api.js";
import { go } from "../navigation.js";
import { Dialog } from "../parts/dialog.js";
import { bytes, clock } from "../parts/format.js";
import { ErrorNote, Progress } from "../parts/widgets.js";
import { ENDPOINTS } from "../request_lines.js";
import { FileChoice, isSound, sendFile } from "./tasks_file_choice.js";

const MAX_KNOWN_FILES = 200;

/** @param {{file: string, onClose: () => void}} props `file`: the id of one that the mesh has; empty: one is chosen. */
export function NewBatch({ file, onClose }) {
  const [choice, setChoice] = useState(/** @type {import("./tasks_file_choice.js").Choice | null} */ (null));
  const [form, setForm] = useState({ fileId: file, endpoint: ENDPOINTS[0], hours: "24", metadata: "", waits: false });
  const [share, setShare] = useState(/** @type {number | null} */ (null));
  const [error, setError] = useState(/** @type {unknown} */ (null));
  const stop = useRef(new AbortController());
  useEffect(() => () => stop.current.abort(), []);
  const known = useKnownFiles();
  /** @param {Partial<typeof form>} change */
  const set = (change) => setForm((old) => ({ ...old, ...change }));
  const endpoint = form.fileId ? form.endpoint : (choice?.report?.endpoint ?? "");
  const begin = async () => {
    let fileId = form.fileId;
    if (!fileId) {
      setShare(0);
      fileId = (await sendFile(/** @type {File} */ (choice?.file), setShare, stop.current.signal)).id;
      // If the batch is refused, the file is not sent again.
      set({ fileId, endpoint });
    }
    const batch = await post("/v1/batches", {
      input_file_id: fileId,
      endpoint,
      completion_window: "24h",
      window_seconds: Math.round(Number(form.hours) * 3600),
      ...(form.waits && { wait_for_model: true }),
      ...(form.metadata.trim() && { metadata: pairs(form.metadata) }),
    });
    onClose();
    go(`tasks/batches/${batch.id}`);
  };
  /** @param {Event} event */
  const submit = (event) => {
    event.preventDefault();
    setError(null);
    begin().catch(setError).finally(() => setShare(null));
  };
  const isReady = Boolean(form.fileId) || isSound(choice);
  return html`<${Dialog} title="New batch" onClose=${onClose} isWide=${true}>
    <form onSubmit=${submit}>
      ${!form.fileId && html`<${FileChoice} choice=${choice} onChoice=${setChoice} />`}
      ${known.length > 0 &&
      html`<label>${form.fileId ? "File" : "Or an uploaded file"} <select value=${form.fileId} onChange=${on(set, "fileId")}>
        <option value="">${form.fileId ? "a file of this machine" : "none"}</option>
        ${known.map((each) => html`<option key=${each.id} value=${each.id}>${each.filename}, ${bytes(each.bytes)}, ${clock(each.created_at * 1000)}</option>`)}</select></label>`}
      ${form.fileId &&
      html`<label>Endpoint <select value=${form.endpoint} onChange=${on(set, "endpoint")}>
        ${ENDPOINTS.map((path) => html`<option key=${path} value=${path}>${path}</option>`)}</select></label>`}
      <div class="split">
        <label>Completion window (h) <input type="number" min="0.02" max="168" step="any" required value=${form.hours} onInput=${on(set, "hours")} /></label>
        <label>Metadata <input value=${form.metadata} placeholder="team=search, run=7" spellcheck=${false} onInput=${on(set, "metadata")} /></label>
      </div>
      <label class="inline"><input type="checkbox" checked=${form.waits} onChange=${(/** @type {any} */ event) => set({ waits: event.target.checked })} />
        Accept models that the mesh does not have yet, and wait for them</label>
      ${share !== null && html`<p role="status">${share < 1 ? "Sending…" : "Storing the lines…"} <${Progress} value=${share < 1 ? share : null} label="Sent" /></p>`}
      <${ErrorNote} error=${error} />
      <div class="buttons"><button type="button" onClick=${onClose}>Cancel</button>
        <button type="submit" class="main" disabled=${!isReady || share !== null}>Start</button></div>
    </form>
  </${Dialog}>`;
}

/** @param {(change: any) => void} set @param {string} name */
const on = (set, name) => (/** @type {any} */ event) => set({ [name]: event.target.value });

/** Names and values of "a=1, b=2". @param {string} text */
function pairs(text) {
  return Object.fromEntries(text.split(",").map((pair) => pair.split("=")).map(([name, ...value]) => [name.trim(), value.join("=").trim()]));
}

/** The input files that the mesh has, the newest first. @returns {any[]} */
function useKnownFiles() {
  const [files, setFiles] = useState([]);
  useEffect(() => {
    get("/v1/files", { purpose: "batch", limit: MAX_KNOWN_FILES }).then(
      (found) => setFiles(found.data),
      () => {},
    );
  }, []);
  return files;
}
