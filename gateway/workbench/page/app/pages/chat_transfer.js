// Conversations as a file: written out, and read with all that is wrong in a file left out.
import { defaultOptions, newAnswer, newId, titleOf } from "./chat_conversation.js";

/** @typedef {import("./chat_conversation.js").Conversation} Conversation */
/** @typedef {import("./chat_conversation.js").Part} Part */

const KIND = "weft-conversations";
const MAX_TEXT_CHARS = 4 * 1024 * 1024;
const MAX_LIST = 10_000;

/** Gives conversations to the person as a file. @param {Conversation[]} conversations @param {string} name */
export function save(conversations, name) {
  const text = JSON.stringify({ kind: KIND, version: 1, conversations }, null, 1);
  const url = URL.createObjectURL(new Blob([text], { type: "application/json" }));
  const link = document.createElement("a");
  link.href = url;
  link.download = `${name.replace(/[^\p{L}\p{N} _-]+/gu, " ").trim().slice(0, 60) || "conversations"}.json`;
  link.click();
  setTimeout(() => URL.revokeObjectURL(url), 1000);
}

/** The conversations of a file, with their own ids. Raises Error for another file. @param {string} text @returns {Conversation[]} */
export function parse(text) {
  let file;
  try {
    file = JSON.parse(text);
  } catch {
    throw new Error("The file is not JSON.");
  }
  if (file?.kind !== KIND || !Array.isArray(file.conversations)) throw new Error("The file contains no conversations.");
  return file.conversations.slice(0, MAX_LIST).map(conversationOf);
}

/** @param {unknown} value */
const textOf = (value) => (typeof value === "string" ? value.slice(0, MAX_TEXT_CHARS) : "");
/** @param {unknown} value @returns {any[]} */
const listOf = (value) => (Array.isArray(value) ? value.slice(0, MAX_LIST) : []);
/** @param {unknown} value */
const timeOf = (value) => (typeof value === "number" && Number.isFinite(value) ? value : Date.now());

/** @param {any} given @returns {Conversation} */
function conversationOf(given) {
  const turns = listOf(given?.turns).map(turnOf);
  const models = listOf(given?.models).map(textOf).slice(0, 2);
  const { system, temperature, maxTokens, thinking } = given?.options ?? {};
  return {
    id: newId("chat-"),
    title: titleOf(textOf(given?.title)) || titleOf(turns[0]?.text ?? ""),
    createdAt: timeOf(given?.createdAt),
    updatedAt: timeOf(given?.updatedAt),
    models: models.length ? models : [""],
    options: {
      ...defaultOptions(),
      system: textOf(system),
      temperature: textOf(temperature),
      maxTokens: textOf(maxTokens),
      thinking: thinking === "on" || thinking === "off" ? thinking : "",
    },
    turns,
  };
}

/** @param {any} given @returns {import("./chat_conversation.js").Turn} */
function turnOf(given) {
  return {
    id: newId("turn-"),
    text: textOf(given?.text),
    attachments: listOf(given?.attachments).flatMap(attachmentOf),
    answers: listOf(given?.answers).slice(0, 2).map(answerOf),
    ...versionsOf(given, turnOf),
  };
}

/** @template T @param {any} given @param {(item: any) => T} itemOf @returns {{versions?: (T[] | null)[]}} */
function versionsOf(given, itemOf) {
  const versions = listOf(given?.versions).map((each) => (each === null ? null : listOf(each).map(itemOf)));
  const isWhole = versions.filter((each) => each === null).length === 1 && versions.every((each) => each?.length !== 0);
  return isWhole ? { versions } : {};
}

/** @param {any} given @returns {import("./chat_conversation.js").Answer} */
function answerOf(given) {
  const answer = newAnswer(textOf(given?.model));
  const error = given?.error ? { message: textOf(given.error.message), code: textOf(given.error.code) } : null;
  const state = /** @type {import("./chat_conversation.js").Answer["state"]} */ (
    ["complete", "stopped", "failed"].includes(given?.state) ? given.state : "stopped"
  );
  return Object.assign(answer, {
    requestId: textOf(given?.requestId), state, error, parts: listOf(given?.parts).flatMap(partOf), finishReason: textOf(given?.finishReason),
    isReceiptSought: true, // It may be a request of another mesh.
    isEdited: given?.isEdited === true, ...versionsOf(given, answerOf),
  });
}

/** @param {any} given @returns {Part[]} */
function partOf(given) {
  const text = textOf(given?.text);
  switch (given?.kind) {
    case "text":
    case "thinking":
      return [{ kind: given.kind, text }];
    case "tool": {
      const result = given.result === null ? null : textOf(given.result);
      return [{ kind: "tool", id: textOf(given.id), name: textOf(given.name), arguments: textOf(given.arguments), result, isFailed: given.isFailed === true }];
    }
    case "signal":
      return [{ kind: "signal", name: textOf(given.name), text }];
    case "lost":
      return [{ kind: "lost", text, why: textOf(given.why) }];
    case "warning":
      return [{ kind: "warning", code: textOf(given.code), text }];
    default:
      return [];
  }
}

/** @param {any} given @returns {import("./chat_conversation.js").Attachment[]} */
function attachmentOf(given) {
  const data = typeof given?.data === "string" ? given.data : "";
  const kind = given?.kind;
  if (kind === "text") {
    const text = textOf(data);
    return [{ kind, name: textOf(given.name).slice(0, 200), type: "text/plain", bytes: new Blob([text]).size, data: text }];
  }
  if ((kind !== "image" && kind !== "audio") || !data.startsWith(`data:${kind}/`)) return [];
  return [{ kind, name: textOf(given.name).slice(0, 200), type: textOf(given.type).slice(0, 100), bytes: Math.floor(data.length * 0.75), data }];
}
