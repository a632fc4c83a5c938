// What the chat does: the shown conversation, its answers under way, and what becomes of it.
import { signal } from "@preact/signals";
import { go } from "../navigation.js";
import { attempt, notify } from "../parts/notices.js";
import { bodyOf, isBusy, isRunning, newAnswer, newConversation, newId, textOf, titleOf, touch } from "./chat_conversation.js";
import { ask, fetchReceipt } from "./chat_ask.js";
import { fetchConversation, tasksOfCaller } from "./chat_elsewhere.js";
import { keepDraft } from "./chat_drafts.js";
import { remember } from "./chat_models.js";
import { enqueue, isDue, takeQueued } from "./chat_queue.js";
import { deleted, forget, keep, load } from "./chat_store.js";
import { cancel, forgetTasks } from "./chat_task.js";
import { addVersion, allAnswers, showVersion } from "./chat_versions.js";

/** @typedef {import("./chat_conversation.js").Conversation} Conversation */
/** @typedef {import("./chat_conversation.js").Answer} Answer */
/** @typedef {import("./chat_conversation.js").Attachment} Attachment */

const KEEP_MILLISECONDS = 3000;
/** Tasks that are searched for a conversation that this browser lacks, and for news of one that it has. */
const SEARCHED = 1000;
const SEARCHED_FOR_NEWS = 100;

/** The conversation that is shown. @type {import("@preact/signals").Signal<Conversation>} */
export const shown = signal(newConversation([""]));
/** What `open` opens last: what is loaded for another address is dropped. */
let wanted = "";

/** The answers that come now, by their id: they go on while another conversation, or another page, is shown.
 * @type {Map<string, {abort: AbortController, conversation: Conversation}>} */
const running = new Map();

/** Shows the conversation of that id; a new one where there is none. @param {string} id @param {string} model */
export async function open(id, model = "") {
  wanted = id;
  if (id && shown.value.id === id) return void complete(shown.value);
  // A message may be written in it already.
  if (!id && !model && shown.value.turns.length === 0) return;
  if (!id) return start(model ? [model] : undefined);
  const found = conversationOf(id) ?? (await load(id)) ?? (await fetchConversation(id, SEARCHED).catch(() => null));
  if (wanted !== id) return;
  if (!found) {
    notify("Neither this browser nor the mesh has this conversation.", { isError: true });
    go("chat", {}, { replace: true });
    return;
  }
  shown.value = found;
  void complete(found);
  void renew(found);
}

/** Takes over what another browser has asked since in a conversation. @param {Conversation} conversation
 * @param {string} task its newest one; "": not known */
export async function renew(conversation, task = "") {
  if (allAnswers(conversation.turns).some(({ taskId }) => task && taskId === task)) return;
  const newer = await fetchConversation(conversation.id, SEARCHED_FOR_NEWS).catch(() => null);
  const asked = allAnswers(conversation.turns).map((answer) => answer.taskId);
  const isLocal = conversation.turns.at(-1)?.answers.some((answer) => !answer.taskId);
  if (!newer || isLocal || newer.turns.at(-1)?.answers.every((answer) => asked.includes(answer.taskId))) return;
  if (!merge(conversation, newer.turns)) return;
  changed(conversation);
  await complete(conversation);
}

/** Takes over the newest answers, and what was asked after them; false: the messages before differ, and all stays as it is here.
 * @param {Conversation} conversation @param {Conversation["turns"]} newer */
function merge({ turns }, newer) {
  const last = newer.length - 1;
  if (newer.some(({ text }, at) => at < turns.length && turns[at].text !== text)) {
    notify("Another browser has changed an earlier message of this conversation. Here it stays as it was.");
    return false;
  }
  const known = turns[last];
  if (!known) turns.push(...newer.slice(turns.length));
  else if (known.answers.length === newer[last].answers.length) {
    known.id = newer[last].id;
    newer[last].answers.forEach((answer, column) => addVersion(known.answers, column, answer, 1));
  }
  return true;
}

/** The conversation of that id if an answer of it comes now. @param {string} id */
const conversationOf = (id) => [...running.values()].find((each) => each.conversation.id === id)?.conversation;

/** Completes what was missing when the page was closed: answers that come still are followed again, receipts asked for.
 * @param {Conversation} conversation */
async function complete(conversation) {
  /** @type {Answer[]} */
  const unsettled = [];
  conversation.turns.forEach(({ answers }, at) =>
    answers.forEach((answer, column) => {
      if (running.has(answer.id)) return;
      if (isRunning(answer) && (answer.taskId || answer.isSubmitted === false)) void run(conversation, column, at);
      else if (isRunning(answer) || !answer.isReceiptSought) unsettled.push(answer);
    }),
  );
  if (!unsettled.length) return;
  for (const answer of unsettled) if (isRunning(answer)) interrupt(answer);
  await Promise.all(unsettled.map(fetchReceipt));
  await keep(conversation);
}

/** An answer that was coming when the page was closed. @param {Answer} answer */
function interrupt(answer) {
  Object.assign(answer, { state: "failed", status: "", share: null, isReceiptSought: false });
  answer.error = { message: "The page was closed before the answer was complete.", code: "" };
  touch(answer);
}

/** Shows a conversation that is not kept yet. @param {Conversation} conversation */
export function show(conversation) {
  shown.value = conversation;
}

/** Begins a new conversation, which is kept once it has a message. @param {string[]} models */
export function start(models = shown.value.models) {
  shown.value = newConversation(models, shown.value.options);
}

/** Changes something of the shown conversation. @param {(conversation: Conversation) => void} how */
export function change(how) {
  const conversation = shown.value;
  how(conversation);
  touch(conversation);
  void keep(conversation);
}

/** Sends a message and asks every model of the conversation; while an answer comes, the message waits for its end.
 * @param {string} text @param {Attachment[]} attachments */
export function send(text, attachments) {
  const conversation = shown.value;
  if (isBusy(conversation)) return change(() => enqueue(conversation, { text, attachments }));
  remember(conversation.models[0]);
  conversation.title ||= titleOf(text || (attachments[0]?.name ?? ""));
  addTurn(conversation, { text, attachments });
  go(`chat/${conversation.id}`, {}, { replace: true });
}

/** @param {Conversation} conversation @param {import("./chat_conversation.js").Queued} message */
function addTurn(conversation, message) {
  conversation.turns.push({ id: newId("turn-"), ...message, answers: [] });
  answerTurn(conversation, conversation.turns.length - 1);
}

/** Sends a message that waits. @param {number} at @param {Conversation} conversation */
export function sendQueued(at, conversation = shown.value) {
  const message = takeQueued(conversation, at);
  if (message) addTurn(conversation, message);
}

/** Takes a message out of the queue of the shown conversation. @param {number} at */
export function unqueue(at) {
  const message = takeQueued(shown.value, at);
  change(() => {});
  return message;
}

/** Sends a message again with another text; the earlier version stays with what came after it. @param {number} at @param {string} text */
export function resend(at, text) {
  const conversation = shown.value;
  stopAll(conversation);
  const { attachments } = conversation.turns[at];
  addVersion(conversation.turns, at, { id: newId("turn-"), text, attachments, answers: [] }, Infinity);
  answerTurn(conversation, at);
}

/** Shows another version of a message. @param {number} at @param {number} number */
export function showTurn(at, number) {
  change(({ turns }) => showVersion(turns, at, number, Infinity));
  void complete(shown.value);
}

/** Shows another version of an answer. @param {number} at @param {number} column @param {number} number */
export function showAnswer(at, column, number) {
  change(({ turns }) => showVersion(turns[at].answers, column, number, 1));
  void complete(shown.value);
}

/** Deletes a message with its answers, and with all other versions of it. @param {number} at */
export async function removeTurn(at) {
  const conversation = shown.value;
  if (conversation.turns.length === 1) return remove(conversation.id);
  const tasks = allAnswers(conversation.turns.splice(at, 1)).flatMap(({ taskId }) => taskId || []);
  changed(conversation);
  await forgetAll(new Set(tasks));
}

/** Puts an answer with another text in the place of one. @param {number} at @param {number} column @param {string} text */
export function editAnswer(at, column, text) {
  change(({ turns }) => {
    const { answers } = turns[at];
    const parts = [{ kind: /** @type {"text"} */ ("text"), text }];
    const edited = { ...newAnswer(answers[column].model), requestId: "", isSubmitted: true, parts, isReceiptSought: true, isEdited: true };
    addVersion(answers, column, { ...edited, state: "complete" }, 1);
  });
}

/** @param {Conversation} conversation @param {number} at */
function answerTurn(conversation, at) {
  conversation.turns[at].answers = conversation.models.map((model) => newAnswer(model));
  conversation.models.forEach((_, column) => void run(conversation, column, at));
}

/** Asks again for an answer; the earlier one stays as a version. @param {number} at @param {number} column @param {string} model */
export function regenerate(at, column, model = "") {
  const conversation = shown.value;
  const { answers } = conversation.turns[at];
  stop(answers[column]);
  addVersion(answers, column, newAnswer(model || (conversation.models[column] ?? answers[column].model)), 1);
  void run(conversation, column, at);
}

/** Asks for the rest of an answer that was truncated; the shorter one stays as a version. @param {number} at @param {number} column */
export function continueAnswer(at, column) {
  const { answers } = shown.value.turns[at];
  addVersion(answers, column, newAnswer(answers[column].model, textOf(answers[column])), 1);
  void run(shown.value, column, at);
}

/** Asks for an answer, or follows one that was asked for. @param {Conversation} conversation @param {number} column @param {number} at */
async function run(conversation, column, at) {
  const turn = conversation.turns[at];
  const answer = turn.answers[column];
  const body = bodyOf(conversation, column, at);
  const about = { conversation: conversation.id, title: conversation.title, turn: turn.id, column: String(column) };
  const abort = new AbortController();
  running.set(answer.id, { abort, conversation });
  changed(conversation);
  const timer = setInterval(() => void keep(conversation), KEEP_MILLISECONDS);
  await ask(answer, body, about, abort.signal, () => void keep(conversation));
  clearInterval(timer);
  running.delete(answer.id);
  changed(conversation);
  if (isRunning(answer)) return;
  if (isDue(conversation) && !deleted.has(conversation.id)) sendQueued(0, conversation);
  await fetchReceipt(answer);
  await keep(conversation);
}

/** @param {Conversation} conversation */
function changed(conversation) {
  conversation.updatedAt = Date.now();
  touch(conversation);
  void keep(conversation);
}

/** Stops an answer everywhere: what came of it stays. @param {Answer | undefined} answer */
export function stop(answer) {
  if (answer?.taskId && isRunning(answer)) void attempt(() => cancel(answer));
  else if (answer) running.get(answer.id)?.abort.abort();
}

/** @param {Conversation} conversation */
export function stopAll(conversation) {
  for (const answer of allAnswers(conversation.turns)) if (isRunning(answer)) stop(answer);
}

/** Deletes conversations, and their answers on the mesh; those that come are stopped. @param {string[]} ids */
export async function remove(...ids) {
  for (const { conversation } of running.values()) if (ids.includes(conversation.id)) stopAll(conversation);
  const gone = await Promise.all(ids.map(async (id) => conversationOf(id) ?? (await load(id))));
  await forget(...ids);
  for (const id of ids) keepDraft(id, "", []);
  void attempt(() => removeTasks(ids, gone.flatMap((each) => allAnswers(each?.turns ?? []))));
  if (!ids.includes(shown.value.id)) return;
  start();
  go("chat", {}, { replace: true });
}

/** Deletes the tasks of answers, and those that only the mesh knows as answers of the conversations.
 * @param {string[]} ids of conversations @param {Answer[]} answers */
async function removeTasks(ids, answers) {
  const tasks = new Set(answers.flatMap(({ taskId }) => taskId || []));
  try {
    for await (const task of tasksOfCaller()) if (ids.includes(task.metadata?.conversation)) tasks.add(task.id);
  } finally {
    await forgetAll(tasks);
  }
}

/** @param {Set<string>} tasks */
async function forgetAll(tasks) {
  const remaining = await forgetTasks(tasks);
  if (remaining) notify(`${remaining} of ${tasks.size} answers could not be deleted from the mesh.`, { isError: true });
}
