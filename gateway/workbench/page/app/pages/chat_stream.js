// The stream of one answer: its events become the parts of the answer, its comments what it waits for.
import { ApiError, events } from "../api.js";
import { seconds } from "../parts/format.js";
import { arrived } from "./chat_pace.js";

/** @typedef {import("./chat_conversation.js").Answer} Answer */

/** Asks for an answer that ends with this page, and fills it. Raises ApiError and what the connection raises.
 * @param {Answer} answer @param {Record<string, any>} body @param {Record<string, string>} headers @param {AbortSignal} signal
 * @param {() => void} changed */
export async function stream(answer, body, headers, signal, changed) {
  let isDone = false;
  for await (const { data, comment } of events("POST", "/v1/chat/completions", { body, headers, signal })) {
    if (data === "[DONE]") isDone = true;
    else if (data) take(answer, JSON.parse(data));
    else if (comment) takeComment(answer, comment);
    changed();
  }
  if (!isDone) throw new ApiError(0, { message: "The answer ended before it was complete.", code: "incomplete" });
  answer.state = "complete";
}

/** One chunk of a chat completion, or the error that ends it. @param {Answer} answer @param {any} chunk */
function take(answer, chunk) {
  if (chunk.error) throw new ApiError(0, chunk.error, chunk.request_id);
  answer.state = "streaming";
  show(answer, "");
  if (chunk.usage) answer.usage = chunk.usage;
  if (chunk.weft) takeTool(answer, chunk.weft);
  const choice = chunk.choices?.[0];
  if (!choice) return;
  const { reasoning_content: thinking, content, refusal, tool_calls: calls } = choice.delta ?? {};
  if (thinking) append(answer, "thinking", thinking);
  if (content) append(answer, "text", content);
  if (refusal) append(answer, "text", refusal);
  for (const call of calls ?? []) takeCall(answer, call);
  if (thinking || content || refusal || calls) arrived(answer, true);
  if (choice.finish_reason) answer.finishReason = choice.finish_reason;
}

/** @param {Answer} answer @param {"text" | "thinking"} kind @param {string} text */
export function append(answer, kind, text) {
  const last = answer.parts.at(-1);
  if (last?.kind === kind) last.text += text;
  else answer.parts.push({ kind, text });
}

/** What the mesh says about an answer at this place of it. @param {Answer} answer @param {any} notice */
export function takeTool(answer, notice) {
  const { tool_call: call, tool_result: result, signal, warning } = notice;
  if (call) answer.parts.push({ kind: "tool", id: call.id, name: call.name, arguments: textOfJson(call.arguments), result: null, isFailed: false });
  if (result) {
    const made = answer.parts.findLast((part) => part.kind === "tool" && part.id === result.id);
    if (made?.kind === "tool") Object.assign(made, { result: textOfJson(result.content), isFailed: Boolean(result.failed) });
  }
  if (signal) answer.parts.push({ kind: "signal", name: signal.name, text: textOfJson(signal.arguments) });
  if (warning) answer.parts.push({ kind: "warning", code: warning.code, text: warning.message });
}

/** A tool call that the caller would have to run; it comes in pieces. @param {Answer} answer @param {any} call */
export function takeCall(answer, call) {
  const id = `call ${call.index}`;
  let made = answer.parts.findLast((part) => part.kind === "tool" && part.id === id);
  if (made?.kind !== "tool") {
    made = { kind: "tool", id, name: "", arguments: "", result: null, isFailed: false };
    answer.parts.push(made);
  }
  made.name += call.function?.name ?? "";
  made.arguments += call.function?.arguments ?? "";
}

/** @param {unknown} value */
const textOfJson = (value) => (typeof value === "string" ? value : value === undefined ? "" : JSON.stringify(value, null, 2));

/** @param {number} value */
export const waitSeconds = (value) => (value < 60 ? `${Math.max(0.1, value)} s` : seconds(value));

/** A comment of the stream: what the request waits for, or its receipt. @param {Answer} answer @param {string} comment */
function takeComment(answer, comment) {
  const [kind] = comment.split(" ", 1);
  const fields = Object.fromEntries([...comment.matchAll(/(?:^|\s)([\w-]+)=(\S+)/g)].map((found) => [found[1], found[2]]));
  const about = fields.eta_seconds ? `, about ${waitSeconds(Number(fields.eta_seconds))}` : "";
  if (kind === "queued") {
    const reason = /\breason=(.*)$/.exec(comment)?.[1] ?? "";
    show(answer, `Waiting, position ${fields.position}${about}${reason && `: ${reason}`}`);
  } else if (kind === "loading") {
    const stage = /\bstage=(.*)$/.exec(comment)?.[1] ?? "";
    show(answer, `Loading the model${about}${stage && `: ${stage}`}`, fields.progress ? Number(fields.progress) : null);
  } else if (kind === "prefill") {
    const [done, all] = (comment.split(" ")[1] ?? "").split("/").map(Number);
    show(answer, `Processing the prompt: ${comment.slice("prefill ".length)}`, all ? done / all : null);
  } else if (kind.startsWith("x-")) answer.facts = fields;
}

/** A receipt in the words of the stream's own, for `StreamReceipt`. @param {any} receipt as JSON of protobuf */
export const facts = ({ queue_wait: queue = "0", load_wait: load = "0", left_premises: left = false }) => ({
  "x-queue-wait-ms": String(1000 * parseFloat(queue)),
  "x-load-wait-ms": String(1000 * parseFloat(load)),
  "x-left-premises": String(left),
});

/** @param {Answer} answer @param {string} status @param {number | null} share */
export function show(answer, status, share = null) {
  answer.status = status;
  answer.share = share;
}
