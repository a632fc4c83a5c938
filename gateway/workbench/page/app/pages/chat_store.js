// Where conversations are kept: this browser's IndexedDB, up to a number and a size. Answers are on the mesh too, as tasks.
import { signal } from "@preact/signals";
import { keptName } from "../mesh.js";
import { notify } from "../parts/notices.js";
import { allAnswers, allTurns } from "./chat_versions.js";

/** @typedef {import("./chat_conversation.js").Conversation} Conversation */
/** @typedef {{id: string, title: string, models: string[], updatedAt: number, chars: number}} Summary */

const DATABASE = keptName("weft.chat");
export const MAX_CONVERSATIONS = 200;
/** Characters of all conversations together, their pictures and recordings included. */
export const MAX_CHARS = 50 * 1024 * 1024;

/** All conversations that are kept, the last changed first. @type {import("@preact/signals").Signal<Summary[]>} */
export const kept = signal([]);

/** Other tabs read the list again. */
const channel = new BroadcastChannel(DATABASE);
channel.onmessage = () => void refresh();

/** @type {Promise<IDBDatabase> | null} */
let opening = null;
let hasComplained = false;
/** Conversations that were deleted here: an answer of theirs that still ends does not bring them back. @type {Set<string>} */
export const deleted = new Set();

function database() {
  opening ??= new Promise((resolve, reject) => {
    const request = indexedDB.open(DATABASE, 1);
    request.onupgradeneeded = () => {
      request.result.createObjectStore("conversations", { keyPath: "id" });
      request.result.createObjectStore("summaries", { keyPath: "id" });
    };
    request.onsuccess = () => resolve(request.result);
    request.onerror = () => reject(request.error);
  });
  return opening;
}

/** The result of a request. @template T @param {IDBRequest<T>} request @returns {Promise<T>} */
const resultOf = (request) =>
  new Promise((resolve, reject) => {
    request.onsuccess = () => resolve(request.result);
    request.onerror = () => reject(request.error);
  });

/** Does something in one transaction, which is complete when this returns. The work makes all its requests before it waits.
 * @template T @param {IDBTransactionMode} mode @param {(conversations: IDBObjectStore, summaries: IDBObjectStore) => Promise<T>} work @returns {Promise<T>} */
async function within(mode, work) {
  const transaction = (await database()).transaction(["conversations", "summaries"], mode);
  const end = new Promise((resolve, reject) => {
    transaction.oncomplete = () => resolve(undefined);
    transaction.onabort = () => reject(transaction.error);
  });
  const pending = work(transaction.objectStore("conversations"), transaction.objectStore("summaries"));
  // All that it asks for is asked for. What is not committed when the page is reloaded is undone.
  if (mode === "readwrite") transaction.commit();
  const result = await pending;
  await end;
  return result;
}

/** Reads the list of conversations. */
export async function refresh() {
  try {
    const found = /** @type {Summary[]} */ (await within("readonly", (_, summaries) => resultOf(summaries.getAll())));
    kept.value = found.sort((left, right) => right.updatedAt - left.updatedAt);
  } catch (error) {
    complain(error);
  }
}

/** Keeps a conversation as it is now; the oldest ones go where there are too many. @param {Conversation} conversation */
export async function keep(conversation) {
  const { id, title, models, updatedAt } = conversation;
  if (!conversation.turns.length || deleted.has(id)) return;
  const summary = { id, title, models, updatedAt, chars: charsOf(conversation) };
  try {
    await within("readwrite", (conversations, summaries) =>
      Promise.all([resultOf(conversations.put(conversation)), resultOf(summaries.put(summary))]),
    );
    const others = kept.value.filter((each) => each.id !== id);
    kept.value = [summary, ...others].sort((left, right) => right.updatedAt - left.updatedAt);
    await removeOldest(id);
    channel.postMessage(id);
  } catch (error) {
    complain(error);
  }
}

/** @param {string} id that stays */
async function removeOldest(id) {
  const oldest = [...kept.value].reverse().filter((each) => each.id !== id);
  let count = kept.value.length;
  let chars = kept.value.reduce((sum, each) => sum + each.chars, 0);
  const gone = [];
  for (const each of oldest) {
    if (count <= MAX_CONVERSATIONS && chars <= MAX_CHARS) break;
    gone.push(each);
    count -= 1;
    chars -= each.chars;
  }
  if (!gone.length) return;
  await forget(...gone.map((each) => each.id));
  notify(`This browser stores at most ${MAX_CONVERSATIONS} conversations and ${MAX_CHARS / 1024 / 1024} MB. Removed: ${gone.map((each) => each.title || each.id).join(", ")}.`);
}

/** @param {string} id @returns {Promise<Conversation | null>} */
export async function load(id) {
  try {
    return (await within("readonly", (conversations) => resultOf(conversations.get(id)))) ?? null;
  } catch (error) {
    complain(error);
    return null;
  }
}

/** All conversations that are kept. @returns {Promise<Conversation[]>} */
export const loadAll = () => within("readonly", (conversations) => resultOf(conversations.getAll()));

/** Deletes conversations. @param {string[]} ids */
export async function forget(...ids) {
  for (const id of ids) deleted.add(id);
  try {
    await within("readwrite", (conversations, summaries) =>
      Promise.all(ids.flatMap((id) => [resultOf(conversations.delete(id)), resultOf(summaries.delete(id))])),
    );
    kept.value = kept.value.filter((each) => !ids.includes(each.id));
    channel.postMessage("");
  } catch (error) {
    complain(error);
  }
}

/** How long a conversation is, without writing it out: pictures have millions of characters. @param {Conversation} conversation */
function charsOf(conversation) {
  let chars = conversation.options.system.length + 500;
  for (const turn of allTurns(conversation.turns)) {
    chars += turn.text.length + 200;
    for (const file of turn.attachments) chars += file.data.length;
  }
  for (const { text, attachments } of conversation.queued ?? []) chars += text.length + attachments.reduce((sum, file) => sum + file.data.length, 0);
  for (const answer of allAnswers(conversation.turns)) {
    chars += 2000;
    for (const part of answer.parts) chars += part.kind === "tool" ? part.arguments.length + (part.result?.length ?? 0) : part.text.length;
  }
  return chars;
}

/** Says once why nothing is kept. @param {unknown} error */
function complain(error) {
  if (hasComplained) return;
  hasComplained = true;
  notify(`Conversations cannot be stored in this browser: ${error instanceof Error ? error.message : String(error)}`, { isError: true });
}
