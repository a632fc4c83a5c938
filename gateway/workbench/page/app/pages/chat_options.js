// What a conversation asks of its models beside its messages: system prompt, sampling, thinking, leaving the premises.
import { html } from "../parts/html.js";
import { can } from "../session.js";
import { revisionOf, touch } from "./chat_conversation.js";
import { change } from "./chat_state.js";

/** @typedef {import("./chat_conversation.js").Conversation} Conversation */
/** @typedef {import("./chat_conversation.js").Options} Options */

/** @param {{conversation: Conversation}} props */
export function OptionsPanel({ conversation }) {
  revisionOf(conversation);
  const { options } = conversation;
  const set = (/** @type {Partial<Options>} */ changed) => {
    Object.assign(options, changed);
    touch(conversation);
  };
  return html`<div class="options panel" role="group" aria-label="Options" onChange=${() => change(() => {})}>
    <label class="wide">System prompt <textarea rows="2" value=${options.system} dir="auto"
      onInput=${(/** @type {any} */ event) => set({ system: event.target.value })}></textarea></label>
    <label>Temperature <input type="number" min="0" max="2" step="0.1" placeholder="Default" value=${options.temperature}
      onInput=${(/** @type {any} */ event) => set({ temperature: event.target.value })} /></label>
    <label>Max tokens <input type="number" min="1" step="1" placeholder="Default" value=${options.maxTokens}
      onInput=${(/** @type {any} */ event) => set({ maxTokens: event.target.value })} /></label>
    <label>Thinking <select value=${options.thinking} onChange=${(/** @type {any} */ event) => set({ thinking: event.target.value })}>
      <option value="">Default</option><option value="on">on</option><option value="off">off</option></select></label>
    ${can("remote:create") &&
    html`<label class="inline"><input type="checkbox" checked=${options.allowRemote}
      onChange=${(/** @type {any} */ event) => set({ allowRemote: event.target.checked })} /> Allow remote models</label>`}
  </div>`;
}
