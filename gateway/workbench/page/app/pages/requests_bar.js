// How long a request took, as a bar in the colors of its timeline, on the scale of the longest one in the list.
import { html } from "../parts/html.js";
import { seconds } from "../parts/format.js";
import { tookSoFar } from "./requests_words.js";

/** @typedef {"queue" | "load" | "attempt" | "prompt" | "answer"} Kind */

/** @type {Record<Kind, string>} */
const TITLES = { queue: "queue", load: "load", attempt: "attempt", prompt: "until first token", answer: "answer" };
/** What a request without a receipt does. @type {Record<string, Kind>} */
const STATES = { queued: "queue", loading: "load", running: "attempt", ended: "attempt" };

/** Seconds of each part, one after the other. @param {any} request @param {number} now @returns {[Kind, number][]} */
function partsOf(request, now) {
  const whole = tookSoFar(request, now);
  const { receipt } = request;
  if (!receipt) return [[STATES[request.state], whole]];
  const queue = Math.min(whole, receipt.queueWaitSeconds ?? 0);
  const load = Math.min(whole - queue, receipt.loadWaitSeconds ?? 0);
  const first = Math.max(queue + load, Math.min(whole, receipt.timeToFirstTokenSeconds ?? whole));
  const known = /** @type {[Kind, number][]} */ ([["queue", queue], ["load", load], ["prompt", first - queue - load], ["answer", whole - first]]);
  return known.filter(([, value]) => value > 0);
}

/** @param {{request: any, longest: number, now: number}} props */
export function DurationBar({ request, longest, now }) {
  const parts = partsOf(request, now);
  const texts = parts.map(([kind, value]) => `${TITLES[kind]} ${seconds(value)}`);
  return html`<span class="duration"><span class="parts" role="img" aria-label=${`Duration: ${texts.join(", ") || "0 ms"}`} title=${texts.join("\n")}>
      ${parts.map(([kind, value]) => html`<span key=${kind} class=${`span-${kind}`} style=${`width:${(100 * value) / (longest || 1)}%`}></span>`)}</span>
    <span class="value">${seconds(tookSoFar(request, now))}</span></span>`;
}
