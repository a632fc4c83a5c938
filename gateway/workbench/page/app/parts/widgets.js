// Small parts that pages share: states, bars of shares, facts, text to copy, and the note of an error.
import { html, useState } from "./html.js";
import { words } from "./format.js";

const GOOD = new Set(["active", "ready", "succeeded", "completed", "ok", "connected", "live"]);
const BUSY = new Set(["loading", "running", "pending", "queued", "waking", "streaming", "unloading", "draining", "starting", "stopping", "in_progress", "validating", "finalizing"]);
const BAD = new Set(["failed", "error", "expired", "unreachable", "crashed", "crash-loop", "refused", "lost"]);

/** A state in colour and in words. @param {{value: string | undefined, title?: string}} props */
export function State({ value, title }) {
  const name = (value ?? "").toLowerCase();
  const tone = GOOD.has(name) ? "good" : BUSY.has(name) ? "busy" : BAD.has(name) ? "bad" : "";
  return html`<span class="state ${tone}" title=${title}>${words(value)}</span>`;
}

/** Parts of a whole side by side. `parts`: what each is, its share in the unit of `total`, and its tone.
 * @param {{label: string, total: number, parts: {name: string, value: number, tone: string, text?: string}[]}} props */
export function Bar({ label, total, parts }) {
  const shown = parts.filter((part) => part.value > 0);
  const told = shown.map((part) => `${part.name} ${part.text ?? part.value}`).join(", ");
  return html`<div class="bar" role="img" aria-label=${`${label}: ${told || "empty"}`}>
    ${shown.map(
      (part) => html`<span key=${part.name} class=${part.tone} style=${`width:${Math.min(100, (100 * part.value) / (total || 1))}%`}
        title=${`${part.name}: ${part.text ?? part.value}`}></span>`,
    )}
  </div>`;
}

/** Progress from 0 to 1; null: it is not known how far. @param {{value: number | null, label: string}} props */
export function Progress({ value, label }) {
  return value === null
    ? html`<progress aria-label=${label}></progress>`
    : html`<progress aria-label=${label} max="1" value=${value}></progress>`;
}

/** Names and values; those without a value are left out. @param {{facts: [string, any][]}} props */
export function Facts({ facts }) {
  const known = facts.filter(([, value]) => value !== undefined && value !== null && value !== "" && value !== false);
  return html`<dl class="facts">${known.map(([name, value]) => html`<div key=${name}><dt>${name}</dt><dd>${value}</dd></div>`)}</dl>`;
}

/** Text to copy, such as a command. `shown`: what is shown of it, where that is not the text itself.
 * @param {{text: string, label?: string, title?: string, shown?: any, canWrap?: boolean}} props */
export function Code({ text, label = "Code", title = "", shown = text, canWrap = false }) {
  const [isCopied, setCopied] = useState(false);
  const [isWrapped, setWrapped] = useState(false);
  const copy = async () => {
    await navigator.clipboard?.writeText(text);
    setCopied(true);
    setTimeout(() => setCopied(false), 1500);
  };
  return html`<div class="code"><div class="code-head">${title && html`<span class="code-title faint">${title}</span>`}
      ${canWrap && html`<button class="quiet" aria-pressed=${isWrapped} onClick=${() => setWrapped(!isWrapped)}>Wrap</button>`}
      ${navigator.clipboard && html`<button class="quiet copy" onClick=${copy}>${isCopied ? "Copied" : "Copy"}</button>`}</div>
    <pre class=${isWrapped ? "wrapped" : ""} tabindex="0" role="group" aria-label=${label}><code>${shown}</code></pre></div>`;
}

/** The words of an error, and the id by which the logs have it. @param {{error: unknown}} props */
export function ErrorNote({ error }) {
  if (!error) return null;
  const { message, requestId = "", param = "" } = /** @type {any} */ (error);
  return html`<p class="problem" role="alert">${message ?? String(error)}${param && !String(message).includes(param) ? ` (${param})` : ""}
    ${requestId && html` <span class="faint">${requestId}</span>`}</p>`;
}

/** Said instead of a list while it is not there. @param {{live: import("../live.js").Collection}} props */
export function LiveNote({ live }) {
  if (live.problem) return html`<p class="problem" role="status">${live.problem}</p>`;
  return live.isComplete ? null : html`<div class="skeleton" role="status" aria-label="Loading"></div>`;
}
