// What is said of a request: its id, its outcome, how long it took, and what it waits for.
import { html, useState } from "../parts/html.js";
import { post } from "../api.js";
import { address } from "../navigation.js";
import { seconds, words } from "../parts/format.js";
import { Icon } from "../parts/icons.js";
import { retryText } from "../parts/retry.js";
import { State } from "../parts/widgets.js";

/** Ids that the mesh generates are shown up to here after their kind, as commands accept them. */
const SHORT_CHARS = 8;
const GENERATED = /^[a-z]+-[0-9a-f]{24}$/;

/** An id in a path: ids may have slashes. @param {string} id */
const parts = (id) => id.split("/").map(encodeURIComponent).join("/");

/** @param {string} id */
export const pathOf = (id) => `/v1/requests/${parts(id)}`;

/** The path of its prompt and answer. @param {string} id */
export const contentPathOf = (id) => `/v1/admin/captures/${parts(id)}`;

/** Cancels a request of any tenant that the caller may name. @param {string} id */
export const sendCancel = (id) => post(`${pathOf(id)}/cancel`, {}, { query: { allTenants: true } });

/** @param {string} id */
const shortId = (id) => (GENERATED.test(id) ? `${id.slice(0, id.indexOf("-") + 1 + SHORT_CHARS)}…` : id);

/** A link to a request by its short id, and a button that copies the whole one. @param {{id: string}} props */
export function RequestId({ id }) {
  return html`<span class="request-id"><a class="mono cut" href=${address(`requests/${id}`)} title=${id}>${shortId(id)}</a><${CopyId} id=${id} /></span>`;
}

/** @param {{id: string}} props */
export function CopyId({ id }) {
  const [isCopied, setCopied] = useState(false);
  if (!navigator.clipboard) return null;
  const copy = async () => {
    await navigator.clipboard.writeText(id);
    setCopied(true);
    setTimeout(() => setCopied(false), 1500);
  };
  return html`<button class="quiet copy-id" aria-label=${isCopied ? `${id} is copied` : `Copy ${id}`} title="Copy the whole ID" onClick=${copy}>${isCopied
      ? "✓"
      : html`<${Icon} name="copy" />`}</button>`;
}

/** The model that it was asked for. @param {any} request @returns {string} */
export const modelOf = (request) => request.askedModel || request.target;

/** Its state while it continues, and how it ended. @param {any} request @returns {string} */
export function outcomeOf(request) {
  if (request.state !== "ended") return request.state;
  return request.reason || "completed";
}

/** Whether it ended with an error, also a refusal. @param {any} request */
export const isFailed = (request) => request.state === "ended" && !["completed", "cancelled"].includes(outcomeOf(request));

/** Its attempts, in order, while it continues and after. @param {any} request @returns {any[]} */
export const attemptsOf = ({ receipt, attempts }) => receipt?.attempts ?? attempts ?? [];

/** "5 attempts"; empty for at most one. @param {any} request */
export function triesText(request) {
  const tries = attemptsOf(request).length;
  return tries > 1 ? `${tries} attempts` : "";
}

/** The same in colour: an error is one whatever its reason. @param {{request: any}} props */
export function Outcome({ request }) {
  const outcome = outcomeOf(request);
  const tries = triesText(request);
  return html`${isFailed(request) ? html`<span class="state bad" title=${request.message}>${words(outcome)}</span>` : html`<${State} value=${outcome} title=${request.message} />`}${tries && html` <span class="faint">${tries}</span>`}`;
}

/** Seconds from its arrival to its end; null while it continues. @param {any} request */
export function tookOf({ arrivedAt, endedAt, receipt }) {
  if (!endedAt) return null;
  return receipt?.totalSeconds ?? Math.max(0, (Date.parse(endedAt) - Date.parse(arrivedAt)) / 1000);
}

/** Seconds from its arrival to its end, or until now. @param {any} request @param {number} now @returns {number} */
export const tookSoFar = (request, now) => tookOf(request) ?? Math.max(0, (now - Date.parse(request.arrivedAt)) / 1000);

/** What it waits for, in the words of the mesh; empty: it does not wait. @param {any} request */
export function waitText({ queued, loading, retry }, now = Date.now()) {
  if (retry) return retryText({ ...retry, next_at: retry.nextAt, failed: retry.failedCount }, retry.maxAttempts, now);
  if (queued) return queued.reason;
  if (loading) return loading.progress === undefined ? loading.stage : `${loading.stage} (${Math.round(100 * loading.progress)} %)`;
  return "";
}

/** When it is expected to begin; empty: no one knows. @param {any} request */
export function etaText({ queued, loading }) {
  const eta = (queued ?? loading)?.etaSeconds;
  return eta === undefined ? "" : `about ${seconds(eta)}`;
}

/** Whether it waits: for its turn, or for a load. @param {any} request */
export const waits = (request) => request.state === "queued" || request.state === "loading";

/** By what they wait for; first those that wait for a load, then by position and arrival. @param {any} left @param {any} right */
export function byTurn(left, right) {
  const place = (/** @type {any} */ request) => request.queued?.position ?? 0;
  return left.target.localeCompare(right.target) || place(left) - place(right) || (left.arrivedAt < right.arrivedAt ? -1 : 1);
}
