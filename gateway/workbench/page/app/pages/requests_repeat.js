// Repeating a request: a new conversation with the same model, options and messages, as far as this browser has them.
import { go } from "../navigation.js";
import { newConversation } from "./chat_conversation.js";
import { draftKey, draftOf, keepDraft } from "./chat_drafts.js";
import { show } from "./chat_state.js";
import { loadAll } from "./chat_store.js";

/** @typedef {import("./chat_conversation.js").Conversation} Conversation */
/** @typedef {{conversation: Conversation, at: number, model: string}} Asked The message that was sent with a request. */

/** Where a conversation of this browser asked it; null: none did. @param {any} record @returns {Promise<Asked | null>} */
export async function askedHere({ requestId, receipt }) {
  const ids = [requestId, receipt?.taskId].filter(Boolean);
  for (const conversation of await loadAll()) {
    for (const [at, turn] of conversation.turns.entries()) {
      const answers = turn.answers.flatMap((answer) => [answer, ...(answer.versions ?? []).flatMap((each) => each ?? [])]);
      const found = answers.find((answer) => ids.includes(answer.requestId) || ids.includes(answer.taskId));
      if (found) return { conversation, at, model: found.model };
    }
  }
  return null;
}

/** Opens the chat with the messages before it; its own is written and not sent yet. @param {Asked} asked */
export function repeat({ conversation, at, model }) {
  const { text, attachments } = conversation.turns[at];
  const copy = newConversation([model], conversation.options);
  copy.title = conversation.title;
  copy.turns = structuredClone(conversation.turns.slice(0, at));
  const key = draftKey(copy);
  const draft = draftOf(key);
  keepDraft(key, draft.text ? `${draft.text}\n\n${text}` : text, [...draft.files, ...attachments]);
  show(copy);
  go(copy.turns.length ? `chat/${copy.id}` : "chat");
}
