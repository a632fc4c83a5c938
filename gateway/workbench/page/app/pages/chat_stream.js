// The stream of one answer: its events become the parts of the answer, its comments what it waits for.
import { ApiError, events, get, segment } from "../api.js";
import { seconds } from "../parts/format.js";
import { touch } from "./chat_conversation.js";

/** @typedef {import("./chat_conversation.js").Answer} Answer */

/** How often the receipt of a request that has ended is asked for, and how long between. */
const RECEIPT_TRIES = 6;
const RECEIPT_MILLISECONDS = 250;
const CLIENT = "weft-workbench";

/** Asks for an answer and fills it as it comes. Raises nothing: what went wrong is in the answer.
 * @param {Answer} answer @param {Record<string, any>} body @param {string} session @param {AbortSignal} signal */
export async function ask(answer, body, session, signal) {
  const pace = new Pace(answer);
  const headers = { "X-Request-Id": answer.requestId, "X-Client-Id": CLIENT, "X-Session-Id": session };
  let isDone = false;
  try {
    for await (const { data, comment } of events("POST", "/v1/chat/completions", { body, headers, signal })) {
      if (data === "[DONE]") isDone = true;
      else if (data) take(answer, JSON.parse(data));
      else if (comment) takeComment(answer, comment);
      pace.changed();
    }
    if (!isDone) throw new ApiError(0, { message: "The answer ended before it was complete.", code: "incomplete" });
    answer.state = "complete";
  } catch (error) {
    answer.state = signal.aborted ? "stopped" : "failed";
    if (!signal.aborted) answer.error = errorOf(error);
  }
  answer.status = "";
  answer.share = null;
  pace.end();
}

/** @param {unknown} error */
function errorOf(error) {
  if (error instanceof ApiError) return { message: error.message, code: error.code };
  return { message: error instanceof SyntaxError ? "An event of the answer is not valid JSON." : "The connection was lost.", code: "" };
}

/** One chunk of a chat completion, or the error that ends it. @param {Answer} answer @param {any} chunk */
function take(answer, chunk) {
  if (chunk.error) throw new ApiError(0, chunk.error, chunk.request_id);
  answer.state = "streaming";
  answer.status = "";
  answer.share = null;
  if (chunk.usage) answer.usage = chunk.usage;
  if (chunk.weft) takeNotice(answer, chunk.weft);
  const choice = chunk.choices?.[0];
  if (!choice) return;
  const { reasoning_content: thinking, content, refusal, tool_calls: calls } = choice.delta ?? {};
  if (thinking) append(answer, "thinking", thinking);
  if (content) append(answer, "text", content);
  if (refusal) append(answer, "text", refusal);
  for (const call of calls ?? []) takeCall(answer, call);
  if (choice.finish_reason) answer.finishReason = choice.finish_reason;
}

/** @param {Answer} answer @param {"text" | "thinking"} kind @param {string} text */
function append(answer, kind, text) {
  const last = answer.parts.at(-1);
  if (last?.kind === kind) last.text += text;
  else answer.parts.push({ kind, text });
}

/** What the mesh says about an answer at this place of it. @param {Answer} answer @param {any} notice */
function takeNotice(answer, notice) {
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
function takeCall(answer, call) {
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
const waitSeconds = (value) => (value < 60 ? `${Math.max(0.1, value)} s` : seconds(value));

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

/** @param {Answer} answer @param {string} status @param {number | null} share */
function show(answer, status, share = null) {
  answer.status = status;
  answer.share = share;
}

/** Asks for the receipt of an answer that has ended: the mesh may write it a moment later. @param {Answer} answer */
export async function fetchReceipt(answer) {
  const found = await soughtReceipt(answer.requestId);
  if (found) answer.receipt = found;
  answer.isReceiptSought = true;
  touch(answer);
}

/** @param {string} requestId */
async function soughtReceipt(requestId) {
  for (let tries = 0; tries < RECEIPT_TRIES; tries += 1) {
    try {
      const found = await get(`/v1/requests/${segment(requestId)}`);
      if (found.state === "ended") return found;
    } catch (error) {
      if (error instanceof ApiError && error.status === 403) return null;
    }
    await new Promise((resolve) => setTimeout(resolve, RECEIPT_MILLISECONDS * (tries + 1)));
  }
  return null;
}

/** Shows a growing answer at most once per frame, and less often where drawing it takes long. */
class Pace {
  /** @param {Answer} answer */
  constructor(answer) {
    this.answer = answer;
    this.isWaiting = false;
    this.hasEnded = false;
    this.next = 0;
  }

  changed() {
    if (this.isWaiting) return;
    this.isWaiting = true;
    const wait = this.next - performance.now();
    // A hidden tab draws no frames.
    if (document.hidden || wait > 16) setTimeout(() => this.draw(), Math.max(wait, document.hidden ? 200 : 0));
    else requestAnimationFrame(() => this.draw());
  }

  draw() {
    this.isWaiting = false;
    if (this.hasEnded) return;
    const begun = performance.now();
    touch(this.answer);
    // After the work that this frame is for: elements, layout.
    setTimeout(() => (this.next = performance.now() + 2 * (performance.now() - begun)), 0);
  }

  end() {
    this.hasEnded = true;
    touch(this.answer);
  }
}
