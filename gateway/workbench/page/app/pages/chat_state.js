// What the chat does: the shown conversation, its answers under way, and what becomes of it.
import { signal } from "@preact/signals";
import { go } from "../navigation.js";
import { bodyOf, isRunning, newAnswer, newConversation, newId, titleOf, touch } from "./chat_conversation.js";
import { ask, fetchReceipt } from "./chat_stream.js";
import { keep, load } from "./chat_store.js";

/** @typedef {import("./chat_conversation.js").Conversation} Conversation */
/** @typedef {import("./chat_conversation.js").Answer} Answer */
/** @typedef {import("./chat_conversation.js").Attachment} Attachment */

const KEEP_MILLISECONDS = 3000;

/** The conversation that is shown. @type {import("@preact/signals").Signal<Conversation>} */
export const shown = signal(newConversation([]));

/** The answers that come now, by their id: they go on while another conversation, or another page, is shown.
 * @type {Map<string, {abort: AbortController, conversation: Conversation}>} */
const running = new Map();

/** Shows the conversation of that id; a new one where there is none. @param {string} id @param {string} model */
export async function open(id, model = "") {
  if (id && shown.value.id === id) return;
  const under_way = [...running.values()].find((each) => each.conversation.id === id);
  const found = under_way?.conversation ?? (id ? await load(id) : null);
  if (found) shown.value = found;
  else start(model ? [model] : shown.value.models);
}

/** Begins a new conversation, which is kept once it has a message. @param {string[]} models */
export function start(models = shown.value.models) {
  shown.value = newConversation(models, shown.value.options);
}

/** Sends a message and asks every model of the conversation. @param {string} text @param {Attachment[]} attachments */
export function send(text, attachments) {
  const conversation = shown.value;
  conversation.title ||= titleOf(text || (attachments[0]?.name ?? ""));
  conversation.turns.push({ id: newId("turn-"), text, attachments, answers: [] });
  go(`chat/${conversation.id}`, {}, { replace: true });
  answerTurn(conversation, conversation.turns.length - 1);
}

/** Sends a message anew with another text: what came after it is dropped. @param {number} at @param {string} text */
export function resend(at, text) {
  const conversation = shown.value;
  stopAll(conversation);
  conversation.turns.length = at + 1;
  const turn = { ...conversation.turns[at], id: newId("turn-"), text, answers: [] };
  conversation.turns[at] = turn;
  answerTurn(conversation, at);
}

/** @param {Conversation} conversation @param {number} at */
function answerTurn(conversation, at) {
  conversation.turns[at].answers = conversation.models.map(newAnswer);
  conversation.updatedAt = Date.now();
  touch(conversation);
  conversation.models.forEach((_, column) => void run(conversation, column, at));
}

/** Asks one model anew for its answer. @param {number} at @param {number} column */
export function regenerate(at, column) {
  const conversation = shown.value;
  const turn = conversation.turns[at];
  stop(turn.answers[column]);
  turn.answers[column] = newAnswer(conversation.models[column] ?? turn.answers[column].model);
  touch(conversation);
  void run(conversation, column, at);
}

/** @param {Conversation} conversation @param {number} column @param {number} at */
async function run(conversation, column, at) {
  const answer = conversation.turns[at].answers[column];
  const abort = new AbortController();
  running.set(answer.id, { abort, conversation });
  void keep(conversation);
  const timer = setInterval(() => void keep(conversation), KEEP_MILLISECONDS);
  const body = { ...bodyOf(conversation, column, at), model: answer.model };
  await ask(answer, body, conversation.id, abort.signal);
  clearInterval(timer);
  running.delete(answer.id);
  conversation.updatedAt = Date.now();
  touch(conversation);
  await keep(conversation);
  await fetchReceipt(answer);
  await keep(conversation);
}

/** Stops an answer: what came of it stays. @param {Answer | undefined} answer */
export function stop(answer) {
  if (answer) running.get(answer.id)?.abort.abort();
}

/** @param {Conversation} conversation */
export function stopAll(conversation) {
  for (const turn of conversation.turns) for (const answer of turn.answers) if (isRunning(answer)) stop(answer);
}
