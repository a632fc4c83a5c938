// Operations under way that this tab follows: loads, unloads, pulls, removals; their progress, outcome and cancellation.
import { signal } from "@preact/signals";
import { remove, segment } from "../api.js";
import { collection } from "../live.js";
import { can } from "../session.js";
import { command } from "./commands.js";
import { Confirm } from "./dialog.js";
import { bytes, clock, seconds, words } from "./format.js";
import { html, useRef, useState } from "./html.js";
import { Code, Progress, State } from "./widgets.js";

/** Operations begun here that stay on the page after their end. */
const MAX_BEGUN = 64;

/** Operations begun in this tab, as they were then, until they are dismissed.
 * @type {import("@preact/signals").Signal<Map<string, any>>} */
const begun = signal(new Map());

/** The id of an operation. @param {any} operation */
export const idOf = (operation) => operation.name.replace(/^operations\//, "");
/** Whether an operation is over. @param {any} operation */
export const hasEnded = (operation) => ["succeeded", "failed", "cancelled"].includes(operation.state);

/** Keeps an operation that was begun here on the page, also after its end. @param {any} operation */
export function follow(operation) {
  begun.value = new Map([...[...begun.value].slice(1 - MAX_BEGUN), [operation.name, operation]]);
}

/** Takes an operation off the page. @param {any} operation */
export function dismiss(operation) {
  const left = new Map(begun.value);
  left.delete(operation.name);
  begun.value = left;
}

/** Whether an operation was begun here and is not dismissed. @param {any} operation */
export const isBegunHere = (operation) => begun.value.has(operation.name);

/** Operations as they are now, the last first: those under way and the newest that have ended. Their page watches `operation`. */
export function allOperations() {
  const known = new Map([...begun.value, ...collection("operation").value.items]);
  return [...known.values()].sort((left, right) => String(right.createdAt).localeCompare(String(left.createdAt)));
}

/** What an operation does, such as "Load qwen". @param {any} operation */
export function titleOf(operation) {
  const { type, model, source } = operation.action;
  const verb = type === "load" && source ? "serve" : type;
  return `${verb[0].toUpperCase()}${verb.slice(1)} ${source || model || "cached prefixes"}`;
}

/** How far it is, in words. @param {any} operation */
function progressText({ progress, doneBytes, totalBytes, etaSeconds }) {
  const parts = [
    progress === undefined ? "" : `${Math.floor(progress * 100)} %`,
    totalBytes ? `${bytes(doneBytes ?? 0)} of ${bytes(totalBytes)}` : "",
    etaSeconds === undefined ? "" : `about ${seconds(Math.max(1, etaSeconds))} left`,
  ];
  return parts.filter(Boolean).join(" · ");
}

/** What came of it. @param {any} operation */
export function outcomeOf({ result = {}, startedAt, createdAt, endedAt }) {
  const pulled = result.pulled;
  const parts = [
    result.added?.name ? `${result.added.server ? "attached" : "served"} as ${result.added.name}` : "",
    pulled?.sizeBytes ? bytes(pulled.sizeBytes) : "",
    result.memoryBytes ? bytes(result.memoryBytes) : "",
    result.memoryFreedBytes ? `${bytes(result.memoryFreedBytes)} freed` : "",
    result.entryCount ? `${result.entryCount} prefixes dropped` : "",
    endedAt ? `in ${seconds((new Date(endedAt).getTime() - new Date(startedAt ?? createdAt).getTime()) / 1000)}` : "",
  ];
  return parts.filter(Boolean).join(" · ");
}

/** The share that is done, 0 to 1; where only the time left is known, by how that has shrunk; null: unknown.
 * @param {any} operation */
function useShare({ progress, etaSeconds }) {
  const longest = useRef(0);
  if (progress !== undefined) return progress;
  if (etaSeconds === undefined) return null;
  longest.current = Math.max(longest.current, etaSeconds);
  return longest.current ? 1 - etaSeconds / longest.current : null;
}

/** One operation: its progress, how to cancel it, and what came of it. @param {{operation: any, onDismiss?: () => void}} props */
export function OperationNote({ operation, onDismiss }) {
  const [isAsking, setAsking] = useState(false);
  const share = useShare(operation);
  const isOver = hasEnded(operation);
  const what = titleOf(operation);
  // What is under way says its stage again, such as "loading qwen".
  const detail = !isOver && operation.stage && operation.detail?.startsWith(operation.stage) ? "" : operation.detail;
  return html`<section class="operation" aria-label=${what}>
    <div class="row">
      <strong>${what}</strong><${State} value=${operation.state} />
      ${!isOver && html`<${Progress} value=${share} label=${what} />`}
      <span class="faint grow" role="status">${isOver ? outcomeOf(operation) : [words(operation.stage), progressText(operation)].filter(Boolean).join(" · ")}</span>
      <span class="faint">${clock(operation.endedAt ?? operation.createdAt)}</span>
      ${!isOver && can("operations:edit") && html`<button onClick=${() => setAsking(true)}>Cancel</button>`}
      ${isOver && onDismiss && html`<button class="quiet" aria-label=${`Dismiss: ${what}`} onClick=${onDismiss}>×</button>`}
    </div>
    ${detail && html`<p class=${operation.state === "failed" ? "problem" : "faint"}>${detail}</p>`}
    ${isAsking &&
    html`<${Confirm} title=${`Cancel: ${what}`} action="Cancel it" isDangerous
      text=${html`<p>A cancelled load unloads the model. A cancelled pull keeps the downloaded parts.</p>
        <${Code} label="Command" text=${command("mesh", "operation", "cancel", idOf(operation))} />`}
      onDo=${async () => follow(await remove(`/v1/admin/operations/${segment(idOf(operation))}`))} onClose=${() => setAsking(false)} />`}
  </section>`;
}
