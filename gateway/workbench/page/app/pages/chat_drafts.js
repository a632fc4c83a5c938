// Messages that are being written, by conversation: their text stays in this browser, their files in this tab.
import { keptName } from "../mesh.js";

/** @typedef {import("./chat_conversation.js").Attachment} Attachment */

const STORED = keptName("weft.chat.drafts");
const MAX_DRAFTS = 50;
/** A longer draft is not kept. */
const MAX_CHARS = 100_000;

/** @type {Map<string, Attachment[]>} */
const files = new Map();

/** @returns {Record<string, string>} */
function texts() {
  try {
    return JSON.parse(localStorage.getItem(STORED) ?? "{}");
  } catch {
    return {};
  }
}

/** Where the draft of a conversation is: those without a message share one. @param {import("./chat_conversation.js").Conversation} conversation */
export const draftKey = ({ id, turns }) => (turns.length ? id : "new");

/** @param {string} key @returns {{text: string, files: Attachment[]}} */
export const draftOf = (key) => ({ text: String(texts()[key] ?? ""), files: files.get(key) ?? [] });

/** Keeps a draft; an empty one is forgotten. @param {string} key @param {string} text @param {Attachment[]} attached */
export function keepDraft(key, text, attached) {
  const { [key]: _, ...others } = texts();
  const kept = text && text.length <= MAX_CHARS ? [...Object.entries(others), [key, text]] : Object.entries(others);
  try {
    localStorage.setItem(STORED, JSON.stringify(Object.fromEntries(kept.slice(-MAX_DRAFTS))));
  } catch {
    // The storage of this browser is full: the draft lasts as long as its field.
  }
  if (attached.length) files.set(key, attached);
  else files.delete(key);
}
