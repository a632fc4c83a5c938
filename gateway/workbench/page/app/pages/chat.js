// The chat: conversations with any model, pool, agent or route, kept in this browser.
import { html, useEffect, useLayoutEffect, useRef, useState } from "../parts/html.js";
import { Confirm, Dialog } from "../parts/dialog.js";
import { ErrorNote } from "../parts/widgets.js";
import { collection, useLive } from "../live.js";
import { go } from "../navigation.js";
import { can } from "../session.js";
import { ConversationList } from "./chat_list.js";
import { Composer } from "./chat_composer.js";
import { isBusy, revisionOf, titleOf } from "./chat_conversation.js";
import { ModelPicker, ModelsWatch, models, modelsProblem, usualModel } from "./chat_models.js";
import { OptionsPanel } from "./chat_options.js";
import { change, open, remove, renew, shown, stopAll } from "./chat_state.js";
import { Turns } from "./chat_turns.js";
import { save } from "./chat_transfer.js";

/** @typedef {import("./chat_conversation.js").Conversation} Conversation */

/** @param {{name: string, query: URLSearchParams}} props */
export function Page({ name, query }) {
  const [isListOpen, setListOpen] = useState(false);
  const [hasOptions, setOptions] = useState(false);
  useAddress(name, query.get("model") ?? "");
  const conversation = shown.value;
  revisionOf(conversation);
  useEffect(() => {
    if (conversation.models[0] === "" && models.value?.length) setModel(0, usualModel());
  }, [conversation, models.value]);
  useNews(conversation);
  useEscape(() => stopAll(conversation));
  return html`<div class=${isListOpen ? "chat list-open" : "chat"}><${ModelsWatch} />
    <aside class="chat-list" aria-label="Conversations"><${ConversationList} onChosen=${() => setListOpen(false)} /></aside>
    <div class="chat-main">
      <div class="chat-head">
        <h1>Chat</h1>
        <button class="list-button" aria-expanded=${isListOpen} onClick=${() => setListOpen(!isListOpen)}>Chats</button>
        ${conversation.models.map(
          (model, column) => html`<${ModelPicker} key=${column} value=${model} label=${column ? "Second model" : "Model"}
            onChoose=${(/** @type {string} */ id) => setModel(column, id)} />`,
        )}
        <div class="end">
          <button aria-pressed=${conversation.models.length > 1} title="Two models side by side" onClick=${compare}>Compare</button>
          <button aria-expanded=${hasOptions} onClick=${() => setOptions(!hasOptions)}>Options</button>
          ${conversation.turns.length > 0 && html`<${ConversationMenu} conversation=${conversation} />`}
        </div>
      </div>
      <div class="chat-note">
        <${ErrorNote} error=${modelsProblem.value} />
        ${hasOptions && html`<${OptionsPanel} conversation=${conversation} />`}
      </div>
      <${Turns} key=${conversation.id} conversation=${conversation} />
      <${Composer} key=${conversation.id} conversation=${conversation} isBusy=${isBusy(conversation)} />
    </div>
  </div>`;
}

/** Shows what the address names; without a name what was shown last, or else a new conversation.
 * @param {string} name @param {string} model */
function useAddress(name, model) {
  const isFirst = useRef(true);
  // Before anyone can type: a message that was sent to a chat that is replaced would be lost.
  useLayoutEffect(() => {
    const comesBack = isFirst.current && !name && !model && shown.value.turns.length > 0;
    isFirst.current = false;
    if (comesBack) go(`chat/${shown.value.id}`, {}, { replace: true });
    else void open(name, model);
  }, [name, model]);
}

/** @param {number} column @param {string} id */
const setModel = (column, id) => change((conversation) => (conversation.models = conversation.models.with(column, id)));

/** A second model beside the first, or the first alone again. */
function compare() {
  change((conversation) => {
    const [first] = conversation.models;
    const other = models.value?.find((model) => model.id !== first)?.id ?? first;
    conversation.models = conversation.models.length > 1 ? [first] : [first, other];
  });
}

/** Takes over what another browser asks in the conversation while it is shown here. @param {Conversation} conversation */
function useNews(conversation) {
  useLive(...(can("inference:view") ? ["task"] : []));
  const tasks = [...collection("task").value.items.values()].filter((task) => task.metadata?.conversation === conversation.id);
  const newest = tasks.reduce((last, task) => (task.created_at > (last?.created_at ?? "") ? task : last), undefined)?.id;
  useEffect(() => void (newest && renew(conversation, newest)), [conversation, newest]);
}

/** Escape stops what runs, wherever the focus is. @param {() => void} stop */
function useEscape(stop) {
  const latest = useRef(stop);
  latest.current = stop;
  useEffect(() => {
    const onKeyDown = (/** @type {KeyboardEvent} */ event) => {
      if (event.key === "Escape" && !event.defaultPrevented && !document.querySelector("dialog[open]")) latest.current();
    };
    addEventListener("keydown", onKeyDown);
    return () => removeEventListener("keydown", onKeyDown);
  }, []);
}

/** What is done with a whole conversation. @param {{conversation: Conversation}} props */
function ConversationMenu({ conversation }) {
  revisionOf(conversation);
  const [asks, setAsks] = useState(/** @type {"" | "rename" | "delete"} */ (""));
  const box = useRef(/** @type {HTMLDetailsElement | null} */ (null));
  const done = (/** @type {() => void} */ action) => () => {
    if (box.current) box.current.open = false;
    action();
  };
  return html`<details class="more" ref=${box}><summary>More</summary>
      <div class="menu-list">
        <button class="quiet" onClick=${done(() => setAsks("rename"))}>Rename</button>
        <button class="quiet" onClick=${done(() => save([conversation], conversation.title))}>Export</button>
        <button class="quiet" onClick=${done(() => setAsks("delete"))}>Delete</button>
      </div></details>
    ${asks === "rename" && html`<${Rename} conversation=${conversation} onClose=${() => setAsks("")} />`}
    ${asks === "delete" &&
    html`<${Confirm} title="Delete this conversation" action="Delete" isDangerous text="It is deleted from this browser, and its answers from the mesh. There is no other copy."
      onDo=${() => remove(conversation.id)} onClose=${() => setAsks("")} />`}`;
}

/** @param {{conversation: Conversation, onClose: () => void}} props */
function Rename({ conversation, onClose }) {
  revisionOf(conversation);
  const field = useRef(/** @type {HTMLInputElement | null} */ (null));
  const submit = (/** @type {Event} */ event) => {
    event.preventDefault();
    const title = titleOf(field.current?.value ?? "");
    if (title) change((shown) => (shown.title = title));
    onClose();
  };
  return html`<${Dialog} title="Rename" onClose=${onClose}>
    <form onSubmit=${submit}><label>Title <input ref=${field} defaultValue=${conversation.title} maxlength="60" required autofocus /></label>
      <div class="buttons"><button type="button" onClick=${onClose}>Cancel</button><button class="main">Rename</button></div></form>
  </${Dialog}>`;
}
