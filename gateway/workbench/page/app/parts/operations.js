// Operations under way that this tab follows: loads, unloads, pulls, removals; their progress, outcome and cancellation.
import { signal } from "@preact/signals";
import { ApiError, events, get, remove, segment } from "../api.js";
import { can } from "../session.js";
import { command } from "./commands.js";
import { Confirm } from "./dialog.js";
import { bytes, clock, seconds, words } from "./format.js";
import { html, useEffect, useState } from "./html.js";
import { notify } from "./notices.js";
import { Code, Progress, State } from "./widgets.js";

/** Streams at once: a browser allows six connections to a gateway. What is beyond begins when one has ended. */
const MAX_STREAMS = 2;
const RETRY_MILLISECONDS = 1000;
const MAX_RETRIES = 30;
/** Operations kept, those under way included. */
const MAX_KEPT = 64;

/** @type {import("@preact/signals").Signal<Map<string, any>>} */
export const operations = signal(new Map());
/** @type {string[]} */
const waiting = [];
/** @type {Set<string>} */
const followed = new Set();

/** The id of an operation. @param {any} operation */
export const idOf = (operation) => operation.name.replace(/^operations\//, "");
/** Whether an operation is over. @param {any} operation */
export const hasEnded = (operation) => ["succeeded", "failed", "cancelled"].includes(operation.state);

/** Shows an operation and follows it to its end. @param {any} operation */
export function follow(operation) {
  show(operation);
  if (hasEnded(operation) || followed.has(operation.name)) return;
  followed.add(operation.name);
  waiting.push(operation.name);
  next();
}

/** Takes an operation off the page. @param {any} operation */
export function dismiss(operation) {
  const left = new Map(operations.value);
  left.delete(operation.name);
  operations.value = left;
}

/** Follows what is under way, also what others have begun, for as long as the component is shown. */
export function useOperations() {
  useEffect(() => {
    if (!can("operations:view")) return;
    get("/v1/admin/operations", { unfinished: 1, pageSize: MAX_KEPT }).then(
      (answer) => answer.items.reverse().forEach(follow),
      (error) => notify(error.message, { isError: true }),
    );
  }, []);
  return operations.value;
}

/** @param {any} operation */
function show(operation) {
  const known = new Map(operations.value);
  known.set(operation.name, operation);
  for (const [name, each] of known) if (known.size > MAX_KEPT && hasEnded(each)) known.delete(name);
  operations.value = known;
}

function next() {
  while (waiting.length && followed.size - waiting.length < MAX_STREAMS) {
    const name = /** @type {string} */ (waiting.shift());
    void read(name).finally(() => {
      followed.delete(name);
      next();
    });
  }
}

/** Reads the changes of an operation until it has ended. @param {string} name */
async function read(name) {
  const id = name.replace(/^operations\//, "");
  for (let retries = 0; retries < MAX_RETRIES; retries += 1) {
    try {
      for await (const { data } of events("GET", `/v1/admin/operations/${segment(id)}`, { query: { watch: 1 } })) {
        const document = data ? JSON.parse(data) : null;
        if (document?.kind !== "operation") continue;
        retries = 0;
        show(document);
        if (hasEnded(document)) return;
      }
    } catch (error) {
      if (error instanceof ApiError && [401, 403, 404].includes(error.status)) return;
    }
    await new Promise((resolve) => setTimeout(resolve, RETRY_MILLISECONDS));
  }
}

/** What an operation is about: the model, the source, or nothing. @param {any} operation */
export const subjectOf = (operation) => operation.action.model || operation.action.source || "";

/** What an operation does, such as "Load qwen". @param {any} operation */
function title(operation) {
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
function outcome({ result = {}, startedAt, createdAt, endedAt }) {
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

/** One operation: its progress, how to cancel it, and what came of it. @param {{operation: any, onDismiss?: () => void}} props */
export function OperationNote({ operation, onDismiss }) {
  const [isAsking, setAsking] = useState(false);
  const isOver = hasEnded(operation);
  const what = title(operation);
  return html`<section class="operation" aria-label=${what}>
    <div class="row">
      <strong>${what}</strong><${State} value=${operation.state} />
      ${!isOver && html`<${Progress} value=${operation.progress ?? null} label=${what} />`}
      <span class="faint grow" role="status">${isOver ? outcome(operation) : [words(operation.stage), progressText(operation)].filter(Boolean).join(" · ")}</span>
      <span class="faint">${clock(operation.endedAt ?? operation.createdAt)}</span>
      ${!isOver && can("operations:edit") && html`<button onClick=${() => setAsking(true)}>Cancel</button>`}
      ${isOver && onDismiss && html`<button class="quiet" aria-label=${`Dismiss: ${what}`} onClick=${onDismiss}>×</button>`}
    </div>
    ${operation.detail && html`<p class=${operation.state === "failed" ? "problem" : "faint"}>${operation.detail}</p>`}
    ${isAsking &&
    html`<${Confirm} title=${`Cancel: ${what}`} action="Cancel it" isDangerous
      text=${html`<p>A load that is cancelled is unloaded again; a pull keeps what it has loaded.</p>
        <${Code} label="Command" text=${command("operation", "cancel", idOf(operation))} />`}
      onDo=${async () => follow(await remove(`/v1/admin/operations/${segment(idOf(operation))}`))} onClose=${() => setAsking(false)} />`}
  </section>`;
}
