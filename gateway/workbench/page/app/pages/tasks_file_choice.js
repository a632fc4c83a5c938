// A file of requests to choose: checked line by line before it is sent, then sent with its progress.
import { html, useEffect, useRef, useState } from "../parts/html.js";
import { bytes, count } from "../parts/format.js";
import { Progress } from "../parts/widgets.js";
import { checkFile } from "../request_lines.js";
import { upload } from "../transfer.js";

/** What was chosen: `report` is null while the file is being checked.
 * @typedef {{file: File, report: import("../request_lines.js").Report | null}} Choice */

/** @param {{choice: Choice | null, onChoice: (choice: Choice | null) => void}} props */
export function FileChoice({ choice, onChoice }) {
  const [share, setShare] = useState(0);
  const running = useRef(/** @type {AbortController | null} */ (null));
  useEffect(() => () => running.current?.abort(), []);
  /** @param {any} event */
  const choose = async (event) => {
    running.current?.abort();
    const file = event.target.files?.[0];
    if (!file) return onChoice(null);
    const own = (running.current = new AbortController());
    setShare(0);
    onChoice({ file, report: null });
    const report = await checkFile(file, { onProgress: setShare, signal: own.signal });
    if (!own.signal.aborted) onChoice({ file, report });
  };
  return html`<label>File with one request per line <input type="file" accept=".jsonl,.ndjson,.json,.txt" onClick=${forget} onChange=${choose} /></label>
    ${choice && !choice.report && html`<p role="status">Checking ${choice.file.name}… <${Progress} value=${share} label="Checked" /></p>`}
    ${choice?.report && html`<${Verdict} file=${choice.file} report=${choice.report} />`}`;
}

/** The same file chosen again, now mended, is a new choice. @param {any} event */
const forget = (event) => (event.target.value = "");

/** @param {{file: File, report: import("../request_lines.js").Report}} props */
function Verdict({ file, report }) {
  const { requests, problems, models, endpoint, hasMore } = report;
  if (!problems.length) {
    const names = [...models].map(([name, number]) => `${name} (${count(number)})`).join(", ");
    return html`<p role="status" class="verdict">${count(requests)} ${requests === 1 ? "request" : "requests"} for ${endpoint}, ${bytes(file.size)}. Models: ${names}.</p>`;
  }
  return html`<div role="alert" class="problem"><p>${problems.length}${hasMore ? " and more" : ""} ${problems.length === 1 ? "thing is" : "things are"} wrong. A batch of this file would be refused as a whole.</p></div>
    <ol class="lines" tabindex="0" aria-label="Errors">${problems.map(({ line, text }, at) => html`<li key=${at}>${line ? `line ${line}` : "file"}: ${text}</li>`)}</ol>`;
}

/** Whether a chosen file may be sent. @param {Choice | null} choice */
export const isSound = (choice) => Boolean(choice?.report && !choice.report.problems.length);

/** Sends a file of requests; its document as the mesh keeps it.
 * @param {File} file @param {(share: number) => void} onProgress @param {AbortSignal} signal */
export function sendFile(file, onProgress, signal) {
  const form = new FormData();
  form.set("purpose", "batch");
  form.set("file", file, file.name);
  return upload("/v1/files", form, { onProgress, signal });
}
