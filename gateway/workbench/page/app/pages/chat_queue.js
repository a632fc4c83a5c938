// Messages that wait for the answer before them: sent in order by the tab in which they were written.
import { html } from "../parts/html.js";

/** @typedef {import("./chat_conversation.js").Conversation} Conversation */
/** @typedef {import("./chat_conversation.js").Queued} Queued */

export const MAX_QUEUED = 10;

/** @param {string} id of a conversation */
const mark = (id) => `weft.chat.queue.${id}`;

/** Whether one more may wait. @param {Conversation} conversation */
export const hasRoom = ({ queued = [] }) => queued.length < MAX_QUEUED;

/** @param {Conversation} conversation @param {Queued} message */
export function enqueue(conversation, message) {
  (conversation.queued ??= []).push(message);
  sessionStorage.setItem(mark(conversation.id), "1");
}

/** Takes a message out of the queue. @param {Conversation} conversation @param {number} at @returns {Queued | undefined} */
export function takeQueued(conversation, at) {
  const [message] = conversation.queued?.splice(at, 1) ?? [];
  if (!conversation.queued?.length) sessionStorage.removeItem(mark(conversation.id));
  return message;
}

/** Whether this tab sends the queue once the last answers are complete: another tab may show the same conversation.
 * @param {Conversation} conversation */
export const isDue = ({ id, turns }) =>
  sessionStorage.getItem(mark(id)) !== null && Boolean(turns.at(-1)?.answers.every((answer) => answer.state === "complete"));

/** @param {{messages: Queued[], isBusy: boolean, onSend: (at: number) => void, onEdit: (at: number) => void, onRemove: (at: number) => void}} props */
export function QueuedMessages({ messages, isBusy, onSend, onEdit, onRemove }) {
  if (!messages.length) return null;
  return html`<ul class="queued" aria-label="Queued messages">
    ${messages.map(({ text, attachments }, at) => html`<li key=${at}><span class="faint">Queued</span>
      <span class="name" dir="auto">${text || attachments.map((file) => file.name).join(", ")}</span>
      ${!isBusy && html`<button class="quiet" onClick=${() => onSend(at)}>Send now</button>`}
      <button class="quiet" aria-label="Edit queued message" onClick=${() => onEdit(at)}>Edit</button>
      <button class="quiet" aria-label="Remove queued message" onClick=${() => onRemove(at)}>×</button></li>`)}
  </ul>`;
}
