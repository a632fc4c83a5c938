// One request: its timeline, its summary, each decision about it with the endpoints that could have served it, and repeating it.
import { html, useEffect, useState } from "../parts/html.js";
import { get } from "../api.js";
import { address } from "../navigation.js";
import { caller, can } from "../session.js";
import { actor, bytes, clock, count, dollars, figure, seconds, words } from "../parts/format.js";
import { attempt } from "../parts/notices.js";
import { Code, ErrorNote, Facts } from "../parts/widgets.js";
import { Table } from "../parts/table.js";
import { attemptsOf, CopyId, etaText, Outcome, pathOf, sendCancel, tookOf, waitText } from "./requests_words.js";
import { Content } from "./requests_content.js";
import { Waterfall } from "./requests_waterfall.js";

/** @param {{id: string, live: import("../live.js").Collection}} props */
export function RequestDetail({ id, live }) {
  const { record, error } = useRecord(id, live.items.get(id));
  return html`<p class="back"><a href=${address("requests")}>Requests</a></p>
    <div class="row title"><h1 class="mono">${id}</h1><${CopyId} id=${id} />
      ${record && html`<${Outcome} request=${record} />`}<span class="fill"></span>
      ${record && record.state !== "ended" && can("inference:edit") && html`<button onClick=${() => attempt(() => sendCancel(id), `${id} is cancelled.`)}>Cancel</button>`}
      ${record && can("inference:create") && html`<${Repeat} record=${record} />`}</div>
    <${ErrorNote} error=${error} />
    ${record && html`<${Known} record=${record} />`}`;
}

/** Opens the chat with what this browser has sent with the request. @param {{record: any}} props */
function Repeat({ record }) {
  const [found, setFound] = useState(/** @type {{repeat: () => void} | "none" | null} */ (null));
  useEffect(() => {
    let isGone = false;
    const search = async () => {
      const { askedHere, repeat } = await import("./requests_repeat.js");
      const asked = await askedHere(record);
      if (!isGone) setFound(asked ? { repeat: () => repeat(asked) } : "none");
    };
    search().catch(() => isGone || setFound("none"));
    return () => void (isGone = true);
  }, [record.requestId, record.receipt?.taskId]);
  if (!found) return null;
  return found === "none"
    ? html`<span class="faint">Cannot be repeated here: no conversation in this browser has it.</span>`
    : html`<button onClick=${found.repeat}>Repeat</button>`;
}

/** @param {{record: any}} props */
function Known({ record }) {
  return html`${record.message && html`<p class=${record.reason === "cancelled" ? "faint" : "problem"}>${record.message}</p>`}
    ${waitText(record) && html`<p class="panel" role="status">Waiting: ${waitText(record)}${etaText(record) && `, ${etaText(record)}`}</p>`}
    <section class="panel"><h2>Timeline</h2><${Waterfall} record=${record} /></section>
    <section class="panel"><h2>Summary</h2><${Summary} record=${record} /></section>
    <${Content} record=${record} />
    <${Decisions} record=${record} />
    <details><summary>CLI</summary><${Code} label="Command" text=${`weft explain ${record.requestId}`} /></details>`;
}

/** @param {Record<string, string>} labels */
const agentOf = (labels = {}) => [labels.program, labels.agent === "sub" && "sub-agent", labels.purpose !== "turn" && labels.purpose].filter(Boolean).join(", ");

/** @param {{record: any}} props */
function Summary({ record }) {
  const receipt = record.receipt ?? {};
  const timings = receipt.engineTimings ?? {};
  const restored = receipt.restoredPrompt;
  return html`<${Facts} facts=${[
      ["Requested model", record.askedModel ? `${record.askedModel} (${record.target})` : record.target],
      ["Model", receipt.model],
      ["Host", receipt.host],
      ["Tenant", record.tenant],
      ["Client", record.clientId],
      ["Agent", agentOf(record.labels)],
      ["Priority", receipt.loweredPriority ? `${record.priority}, the highest that its key or tenant allows` : record.priority],
      ["Changed", (receipt.changedParameters ?? []).map((/** @type {any} */ each) => `${each.name} ${each.removed ? "removed" : "replaced"} by ${each.author}`).join(", ")],
      ["Arrived", clock(record.arrivedAt)],
      ["Ended", clock(record.endedAt)],
      ["Took", seconds(tookOf(record))],
      ["Attempts", count(attemptsOf(record).length || undefined)],
      ["Queue wait", seconds(receipt.queueWaitSeconds)],
      ["Load wait", receipt.loadWaitSeconds ? seconds(receipt.loadWaitSeconds) : ""],
      ["Time to first token", seconds(receipt.timeToFirstTokenSeconds)],
      ["Tokens in", receipt.promptTokens === undefined ? "" : `${receipt.promptEstimated ? "about " : ""}${count(receipt.promptTokens)}${receipt.cachedPromptTokens ? ` (${count(receipt.cachedPromptTokens)} cached)` : ""}`],
      ["Tokens out", count(receipt.completionTokens)],
      ["Price", dollars(receipt.priceNanodollars)],
      ["Promised", receipt.promisedWait && `first token within ${seconds(receipt.promisedWait.limitSeconds)}: ${receipt.promisedWait.kept ? "kept" : "broken"}`],
      ["Restored", restored && `${count(restored.tokenCount)} tokens from ${restored.source}${restored.savedSeconds ? `, about ${seconds(restored.savedSeconds)} saved` : ""}`],
      ["Tool calls", [[receipt.repairedCallCount, "repaired"], [receipt.retriedCallCount, "made again"]].filter(([times]) => times).map(([times, what]) => `${count(times)} ${what}`).join(", ")],
      ["Compacted", receipt.compaction && (receipt.compaction.passCount ? `to a summary, ${count(receipt.compaction.passCount)} calls before the answer` : "the answer is a summary")],
      ["Sent out", (receipt.toolRuns ?? []).filter((/** @type {any} */ run) => run.host).map((/** @type {any} */ run) => `${run.tool} to ${run.host}: ${bytes(run.sentByteCount ?? 0)}`).join("; ")],
      ["Image steps", receipt.imageSteps ? count(receipt.imageSteps) : ""],
      ["Megapixels", receipt.imagePixels ? figure(receipt.imagePixels / 1e6) : ""],
      ["Audio", receipt.audioMilliseconds ? seconds(receipt.audioMilliseconds / 1000) : ""],
      ["Tokens per second", figure(receipt.tokensPerSecond)],
      ["Accelerator time", seconds(receipt.deviceUsage?.deviceSeconds ?? receipt.gpuSeconds)],
      ["Prompt processing", seconds(timings.prefillSeconds)],
      ["Sent to a remote provider", record.receipt ? (receipt.leftPremises ? "yes, or possibly" : "no") : ""],
      ["Cancelled by", actor(record.cancelledBy)],
      ["Trace", receipt.traceId && traceOf(receipt.traceId)],
      ["Task", receipt.taskId && html`<a href=${address(`tasks/${receipt.taskId}`)}>${receipt.taskId}</a>`],
    ]} />
    ${record.state === "ended" && !record.receipt && html`<p class="faint">No summary: the caller disconnected before it arrived. See the gateway's log.</p>`}`;
}

/** @param {string} id of a trace */
function traceOf(id) {
  const url = caller.value?.traceUrl;
  return url ? html`<a href=${url.replaceAll("{trace_id}", encodeURIComponent(id))} target="_blank" rel="noreferrer noopener">${id}</a>` : id;
}

/** @param {{record: any}} props */
function Decisions({ record }) {
  const decisions = (record.decisions ?? []).map((/** @type {any} */ decision, /** @type {number} */ at) => ({ ...decision, at: String(at) }));
  return html`<section><h2>Decisions</h2>
    <${Table} label="Decisions" rows=${decisions} rowKey=${(/** @type {any} */ decision) => decision.at} empty="No decisions yet." height="40rem"
      columns=${[
        { title: "After", className: "number", cell: (/** @type {any} */ decision) => seconds(decision.ageSeconds) },
        { title: "What", cell: (/** @type {any} */ decision) => words(decision.kind) },
        { title: "Why", className: "wrap", cell: (/** @type {any} */ decision) => html`<${Why} decision=${decision} />` },
      ]} /></section>`;
}

/** @param {{decision: any}} props */
function Why({ decision }) {
  const { detail, policy, candidates = [], candidateCount } = decision;
  return html`${detail}
    ${candidates.length > 0 &&
    html`<ul class="candidates">${candidates.map(
      (/** @type {any} */ each) => html`<li class=${each.chosen ? "chosen" : "faint"}>${each.model}${each.runner ? ` on ${each.runner}` : ""}${each.chosen ? `: chosen${policy ? ` (${words(policy)})` : ""}` : each.gate ? `: ${each.gate}` : ""}${each.gate ? "" : `, score ${figure(each.score)}`}${each.engineLoad ? `, ${each.engineLoad}` : ""}</li>`,
    )}${candidateCount > candidates.length && html`<li class="faint">and ${candidateCount - candidates.length} more</li>`}</ul>`}`;
}

/** The whole record, read again whenever the stream says that it has changed. @param {string} id @param {any} changed */
function useRecord(id, changed) {
  const [found, setFound] = useState(/** @type {{record: any, error: unknown}} */ ({ record: null, error: null }));
  useEffect(() => {
    const stop = new AbortController();
    get(pathOf(id), { allTenants: true }, stop.signal).then(
      (record) => setFound({ record, error: null }),
      (error) => stop.signal.aborted || setFound((before) => ({ ...before, error })),
    );
    return () => stop.abort();
  }, [id, changed]);
  return found;
}
