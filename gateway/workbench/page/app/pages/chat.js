// The chat: conversations with any model, pool, agent or route, kept in this browser.
import { html, useEffect, useRef, useState } from "../parts/html.js";
import { AnswerView } from "./chat_answer.js";
import { Composer } from "./chat_composer.js";
import { isBusy, revisionOf, touch } from "./chat_conversation.js";
import { ModelPicker, ModelsWatch, models, modelsProblem } from "./chat_models.js";
import { open, resend, shown, start, stopAll } from "./chat_state.js";
import { ErrorNote } from "../parts/widgets.js";

/** @typedef {import("./chat_conversation.js").Conversation} Conversation */
/** @typedef {import("./chat_conversation.js").Turn} Turn */

/** @param {{name: string, query: URLSearchParams}} props */
export function Page({ name, query }) {
  useEffect(() => void open(name, query.get("model") ?? ""), [name]);
  const conversation = shown.value;
  revisionOf(conversation);
  useEffect(() => {
    if (!conversation.models.length && models.value?.length) setModel(conversation, 0, models.value[0].id);
  }, [conversation, models.value]);
  useEscape(() => stopAll(conversation));
  return html`<div class="chat"><${ModelsWatch} />
    <div class="chat-head"><h1>Chat</h1>
      ${conversation.models.map(
        (model, column) => html`<${ModelPicker} key=${column} value=${model} label=${column ? "Second model" : "Model"}
          onChoose=${(/** @type {string} */ id) => setModel(conversation, column, id)} />`,
      )}
      <button onClick=${() => start()}>New conversation</button></div>
    <div class="chat-note"><${ErrorNote} error=${modelsProblem.value} /></div>
    <${Turns} conversation=${conversation} />
    <${Composer} key=${conversation.id} conversation=${conversation} isBusy=${isBusy(conversation)} />
  </div>`;
}

/** @param {Conversation} conversation @param {number} column @param {string} id */
function setModel(conversation, column, id) {
  conversation.models = [...conversation.models];
  conversation.models[column] = id;
  touch(conversation);
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

/** @param {{conversation: Conversation}} props */
function Turns({ conversation }) {
  revisionOf(conversation);
  const box = useRef(/** @type {HTMLElement | null} */ (null));
  const isAtEnd = useFollowedEnd(box, conversation.id);
  return html`<div class="turns" ref=${box} tabindex="0" role="log" aria-live="off" aria-label="Conversation">
    <div class="turns-inner">
      ${!conversation.turns.length && html`<p class="faint empty">Ask something. What you write stays in this browser, and goes to the model alone.</p>`}
      ${conversation.turns.map((turn, at) => html`<${TurnView} key=${turn.id} conversation=${conversation} turn=${turn} at=${at} />`)}
    </div>
    ${!isAtEnd && html`<button class="to-end" onClick=${() => box.current?.scrollTo({ top: box.current.scrollHeight })}>↓ To the end</button>`}
  </div>`;
}

/** Keeps the end of what grows in sight, as long as it is: whoever has scrolled up stays there.
 * @param {{current: HTMLElement | null}} box @param {string} id of what is shown */
function useFollowedEnd(box, id) {
  const [isAtEnd, setAtEnd] = useState(true);
  useEffect(() => {
    const element = /** @type {HTMLElement} */ (box.current);
    let follows = true;
    const onScroll = () => {
      follows = element.scrollHeight - element.scrollTop - element.clientHeight < 40;
      setAtEnd(follows);
    };
    const observer = new ResizeObserver(() => {
      if (follows) element.scrollTop = element.scrollHeight;
      else onScroll();
    });
    observer.observe(element);
    observer.observe(/** @type {Element} */ (element.firstElementChild));
    element.addEventListener("scroll", onScroll, { passive: true });
    return () => {
      observer.disconnect();
      element.removeEventListener("scroll", onScroll);
    };
  }, [id]);
  return isAtEnd;
}

/** @param {{conversation: Conversation, turn: Turn, at: number}} props */
function TurnView({ conversation, turn, at }) {
  revisionOf(conversation);
  const [isEdited, setEdited] = useState(false);
  return html`<section class="turn" aria-label=${`Message ${at + 1}`}>
    <div class="asked">
      ${isEdited
        ? html`<${Edit} text=${turn.text} onDone=${(/** @type {string | null} */ text) => (setEdited(false), text !== null && resend(at, text))} />`
        : html`<div class="said" dir="auto">${turn.text}</div>
            <div class="actions"><button class="quiet" onClick=${() => setEdited(true)}>Edit</button></div>`}
    </div>
    <div class=${turn.answers.length > 1 ? "columns" : ""}>
      ${turn.answers.map((answer, column) => html`<${AnswerView} key=${answer.id} answer=${answer} at=${at} column=${column} />`)}
    </div>
  </section>`;
}

/** A message that is changed. @param {{text: string, onDone: (text: string | null) => void}} props */
function Edit({ text, onDone }) {
  const field = useRef(/** @type {HTMLTextAreaElement | null} */ (null));
  useEffect(() => field.current?.focus(), []);
  const onKeyDown = (/** @type {KeyboardEvent} */ event) => {
    if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
      event.preventDefault();
      onDone(field.current?.value ?? "");
    } else if (event.key === "Escape") {
      event.preventDefault();
      onDone(null);
    }
  };
  return html`<textarea ref=${field} aria-label="Message" dir="auto" onKeyDown=${onKeyDown}>${text}</textarea>
    <div class="actions"><button class="quiet" onClick=${() => onDone(null)}>Cancel</button>
      <button onClick=${() => onDone(field.current?.value ?? "")}>Send again</button></div>`;
}
