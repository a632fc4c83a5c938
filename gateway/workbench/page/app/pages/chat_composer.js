// Where a message is written.
import { html, useEffect, useRef } from "../parts/html.js";
import { send, stopAll } from "./chat_state.js";

/** @typedef {import("./chat_conversation.js").Conversation} Conversation */

/** @param {{conversation: Conversation, isBusy: boolean}} props */
export function Composer({ conversation, isBusy }) {
  const field = useRef(/** @type {HTMLTextAreaElement | null} */ (null));
  useEffect(() => field.current?.focus(), []);
  const submit = () => {
    const text = field.current?.value ?? "";
    if (!text.trim() || isBusy || !conversation.models.every(Boolean)) return;
    if (field.current) field.current.value = "";
    send(text, []);
  };
  const onKeyDown = (/** @type {KeyboardEvent} */ event) => {
    if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
    event.preventDefault();
    submit();
  };
  return html`<div class="composer"><div class="field">
    <textarea ref=${field} aria-label="Message" placeholder="Message" rows="1" dir="auto" onKeyDown=${onKeyDown}></textarea>
    ${isBusy
      ? html`<button class="main" title="Escape" onClick=${() => stopAll(conversation)}>Stop</button>`
      : html`<button class="main" title="Enter" onClick=${submit}>Send</button>`}
  </div></div>`;
}
