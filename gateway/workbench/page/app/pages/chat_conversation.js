// A conversation: what was asked, the answers of its one or two models, and the requests that both make.
import { signal } from "@preact/signals";
import { withFiles } from "./chat_text_files.js";

/** @typedef {{kind: "text" | "image" | "audio", name: string, type: string, bytes: number, data: string}} Attachment `data`: the text, else a data: URL */
/**
 * @typedef {{kind: "text" | "thinking", text: string, since?: number, seconds?: number}
 *   | {kind: "tool", id: string, name: string, arguments: string, result: string | null, isFailed: boolean}
 *   | {kind: "signal", name: string, text: string}
 *   | {kind: "warning", code: string, text: string} | {kind: "lost", text: string, why: string}} Part
 * A piece of an answer, at its place in it. `since`, `seconds`: when thinking began, 0 where that is not known, and how long it took. `lost`: what an attempt had answered before it was lost.
 */
/**
 * @typedef {{
 *   id: string, model: string, requestId: string, taskId: string, isSubmitted: boolean, lastEvent: number,
 *   attempt: number, state: "waiting" | "streaming" | "complete" | "stopped" | "failed",
 *   parts: Part[], status: string, share: number | null, finishReason: string, usage: any, facts: Record<string, string>,
 *   error: {message: string, code: string} | null, receipt: any, isReceiptSought: boolean, isEdited?: boolean,
 *   prefix?: string, askedAt?: number, tokens?: number, retry?: import("../parts/retry.js").Retry & {most: number}, versions?: (Answer[] | null)[],
 * }} Answer
 * `taskId`: the task of a durable answer, else "". `isSubmitted`: false until the mesh has accepted or refused it.
 * `lastEvent`, `attempt`: up to where its events are in the parts.
 * `status`, `share`: what it waits for, and how far that is. `facts`: the receipt as the stream has it.
 * `isReceiptSought`: the mesh has given its receipt, or was asked in vain.
 * `prefix`: the text of a truncated answer that it continues, which its parts begin with. `askedAt`: in milliseconds. `tokens`: so far. `retry`: why its last attempt failed,
 * while it waits for the next one.
 * `versions`: the other answers of the same model to the same message; null in the place of the one that has this list.
 */
/** @typedef {{id: string, text: string, attachments: Attachment[], answers: Answer[], versions?: (Turn[] | null)[]}} Turn
 * One answer per model. `versions`: the other forms of the message, each with what followed it; null in its own place. */
/** @typedef {{system: string, temperature: string, maxTokens: string, thinking: "" | "on" | "off", allowRemote: boolean}} Options */
/** @typedef {{id: string, title: string, createdAt: number, updatedAt: number, models: string[], options: Options, turns: Turn[], queued?: Queued[]}} Conversation */
/** @typedef {{text: string, attachments: Attachment[]}} Queued A message that waits for the answer before it. */

/** @type {WeakMap<object, import("@preact/signals").Signal<number>>} */
const revisions = new WeakMap();

/** Changes whenever `touch` is called for the object: components that show it read this. @param {object} object */
export function revisionOf(object) {
  let found = revisions.get(object);
  if (!found) revisions.set(object, (found = signal(0)));
  return found.value;
}

/** Says that an object was changed. @param {object} object */
export function touch(object) {
  const found = revisions.get(object);
  if (found) found.value += 1;
}

/** A random id. @param {string} prefix */
export function newId(prefix) {
  const bytes = crypto.getRandomValues(new Uint8Array(12));
  return prefix + [...bytes].map((byte) => byte.toString(16).padStart(2, "0")).join("");
}

/** @returns {Options} */
export const defaultOptions = () => ({ system: "", temperature: "", maxTokens: "", thinking: "", allowRemote: false });

/** @param {string[]} models @param {Options} options @returns {Conversation} */
export function newConversation(models, options = defaultOptions()) {
  const now = Date.now();
  return { id: newId("chat-"), title: "", createdAt: now, updatedAt: now, models, options: { ...options }, turns: [] };
}

/** @param {string} model @param {string} prefix @returns {Answer} */
export function newAnswer(model, prefix = "") {
  return {
    ...(prefix && { prefix }),
    id: newId("answer-"), model, askedAt: Date.now(), requestId: newId("req-"), taskId: "", isSubmitted: false, lastEvent: 0, attempt: 0,
    state: "waiting", parts: prefixParts(prefix), status: "", share: null,
    finishReason: "", usage: null, facts: {}, error: null, receipt: null, isReceiptSought: false,
  };
}

/** @param {string} prefix @returns {Part[]} */
export const prefixParts = (prefix = "") => (prefix ? [{ kind: "text", text: prefix }] : []);

/** What a conversation is called until it is renamed: how it begins. @param {string} text */
export const titleOf = (text) => text.trim().replace(/\s+/g, " ").slice(0, 60);

/** The words of an answer, without its thinking and its notices. @param {Answer} answer */
export const textOf = (answer) => answer.parts.map((part) => (part.kind === "text" ? part.text : "")).join("");

/** @param {Answer} answer */
export const isRunning = (answer) => answer.state === "waiting" || answer.state === "streaming";

/** @param {Conversation} conversation */
export const isBusy = (conversation) => conversation.turns.some((turn) => turn.answers.some(isRunning));

/** The content of a user's message. @param {Turn} turn */
function contentOf(turn) {
  const text = withFiles(turn.text, turn.attachments);
  const media = turn.attachments.filter((file) => file.kind !== "text");
  if (!media.length) return text;
  return [
    ...(text ? [{ type: "text", text }] : []),
    ...media.map((file) =>
      file.kind === "image"
        ? { type: "image_url", image_url: { url: file.data } }
        : { type: "input_audio", input_audio: { data: file.data.slice(file.data.indexOf(",") + 1), format: formatOf(file) } },
    ),
  ];
}

/** The format of a recording, by its name, else by its type. @param {Attachment} file */
function formatOf(file) {
  const ending = /\.(\w+)$/.exec(file.name)?.[1]?.toLowerCase();
  if (ending === "wav" || ending === "mp3") return ending;
  return /mpeg|mp3/.test(file.type) ? "mp3" : /wav/.test(file.type) ? "wav" : (ending ?? file.type);
}

/** The body of the request that the answer of one model to one turn takes.
 * @param {Conversation} conversation @param {number} column @param {number} at @returns {Record<string, any>} */
export function bodyOf(conversation, column, at) {
  const { options } = conversation;
  /** @type {{role: string, content: any}[]} */
  const messages = [];
  if (options.system.trim()) messages.push({ role: "system", content: options.system });
  conversation.turns.slice(0, at + 1).forEach((turn, number) => {
    messages.push({ role: "user", content: contentOf(turn) });
    const answer = turn.answers[column] ?? turn.answers[0];
    const said = answer && (number < at ? textOf(answer) : answer.prefix);
    if (said) messages.push({ role: "assistant", content: said });
  });
  return {
    model: conversation.turns[at].answers[column]?.model ?? conversation.models[column],
    messages,
    stream: true,
    stream_options: { include_usage: true, include_weft_events: true },
    ...(options.temperature === "" ? {} : { temperature: Number(options.temperature) }),
    ...(options.maxTokens === "" ? {} : { max_tokens: Number(options.maxTokens) }),
    ...(options.thinking === "" ? {} : { enable_thinking: options.thinking === "on" }),
    ...(options.allowRemote ? { allow_remote: true } : {}),
  };
}
