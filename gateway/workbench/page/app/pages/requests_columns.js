// The columns of the list of requests.
import { html } from "../parts/html.js";
import { address } from "../navigation.js";
import { can } from "../session.js";
import { ago, clock, count, seconds } from "../parts/format.js";
import { Progress } from "../parts/widgets.js";
import { DurationBar } from "./requests_bar.js";
import { etaText, modelOf, Outcome, outcomeOf, RequestId, tookSoFar, waitText } from "./requests_words.js";

/** @typedef {import("../parts/table.js").Column} Column */

/** @type {Column} */
const ID = { title: "Request", cell: (request) => html`<${RequestId} id=${request.requestId} />` };
/** @param {string} text */
const cut = (text) => text && html`<span class="cut" title=${text}>${text}</span>`;
/** @type {Column} */
const MODEL = { title: "Model", cell: (request) => cut(modelOf(request)), sort: modelOf };
/** @type {Column} */
const TENANT = { title: "Tenant", cell: (request) => request.tenant, sort: (request) => request.tenant };
/** @type {Column} */
const CLIENT = { title: "Client", cell: (request) => request.clientId ?? "", sort: (request) => request.clientId ?? "" };

/** A column of a figure in the receipt. @param {string} title @param {string} field @param {(value: any) => string} format @param {string} [hint] @returns {Column} */
const ofReceipt = (title, field, format, hint) => ({
  title, hint, className: "number", cell: (request) => format(request.receipt?.[field]), sort: (request) => request.receipt?.[field] ?? -1,
});

/** On one line: the page of the request has all of it. @type {Column} */
const REASON = { title: "Reason", cell: (request) => cut(waitText(request) || request.message || "") };

/** `longest`: seconds of the longest bar. `areFailed`: all of them failed, so the figures of answers say nothing.
 * @param {{now: number, longest: number, hasTenants: boolean, areFailed: boolean}} list @returns {Column[]} */
export function endedColumns({ now, longest, hasTenants, areFailed }) {
  return [
    ID,
    { title: "State", cell: (request) => html`<${Outcome} request=${request} />`, sort: outcomeOf },
    REASON,
    MODEL,
    ...(hasTenants ? [TENANT] : []),
    { title: "Arrived", cell: (request) => html`<span title=${ago(request.arrivedAt)}>${clock(request.arrivedAt)}</span>`, sort: (request) => request.arrivedAt },
    { title: "Duration", cell: (request) => html`<${DurationBar} request=${request} longest=${longest} now=${now} />`, sort: (request) => tookSoFar(request, now) },
    ...(areFailed
      ? []
      : [ofReceipt("First token", "timeToFirstTokenSeconds", seconds), ofReceipt("In", "promptTokens", count, "prompt tokens"), ofReceipt("Out", "completionTokens", count, "answer tokens"), CLIENT]),
  ];
}

/** @param {{now: number, hasTenants: boolean, onCancel: (request: any) => void}} list @returns {Column[]} */
export function waitingColumns({ now, hasTenants, onCancel }) {
  return [
    { title: "Position", className: "number", cell: (request) => request.queued?.position ?? "", sort: (request) => request.queued?.position ?? 0 },
    ID,
    MODEL,
    ...(hasTenants ? [TENANT] : []),
    { title: "State", cell: (request) => html`<${Outcome} request=${request} />`, sort: (request) => request.state },
    { title: "Since", className: "number", cell: (request) => seconds(Math.max(1, Math.round(tookSoFar(request, now)))), sort: (request) => tookSoFar(request, now) },
    { title: "Starts in", className: "number", cell: etaText, sort: (request) => (request.queued ?? request.loading)?.etaSeconds ?? Infinity },
    { title: "Priority", cell: (request) => request.priority, sort: (request) => request.priority },
    CLIENT,
    { title: "Reason", className: "wrap", cell: (request) => html`<${Wait} request=${request} />` },
    {
      title: "Actions",
      cell: (request) => html`<span class="row"><a href=${address(`requests/${request.requestId}`)} aria-label=${`Explain ${request.requestId}`}>Explain</a>
        ${can("inference:edit") && html`<button aria-label=${`Cancel ${request.requestId}`} onClick=${() => onCancel(request)}>Cancel</button>`}</span>`,
    },
  ];
}

/** @param {{request: any}} props */
function Wait({ request }) {
  const progress = request.loading?.progress;
  return html`${waitText(request)}${progress !== undefined && html` <${Progress} value=${progress} label=${`Load for ${request.requestId}`} />`}`;
}
