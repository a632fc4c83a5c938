// What is said of a request: its outcome, how long it took, and what it waits for.
import { html } from "../parts/html.js";
import { seconds, words } from "../parts/format.js";
import { State } from "../parts/widgets.js";

/** Its state while it continues, and how it ended. @param {any} request @returns {string} */
export function outcomeOf(request) {
  if (request.state !== "ended") return request.state;
  return request.reason || "completed";
}

/** The same in colour: an error is one whatever its reason. @param {{request: any}} props */
export function Outcome({ request }) {
  const outcome = outcomeOf(request);
  const isError = request.state === "ended" && outcome !== "completed" && outcome !== "cancelled";
  return isError ? html`<span class="state bad" title=${request.message}>${words(outcome)}</span>` : html`<${State} value=${outcome} title=${request.message} />`;
}

/** Seconds from its arrival to its end; null while it continues. @param {any} request */
export function tookOf({ arrivedAt, endedAt, receipt }) {
  if (!endedAt) return null;
  return receipt?.totalSeconds ?? Math.max(0, (Date.parse(endedAt) - Date.parse(arrivedAt)) / 1000);
}

/** What it waits for, in the words of the mesh; empty: it does not wait. @param {any} request */
export function waitText({ queued, loading }) {
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
