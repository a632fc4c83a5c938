// The messages of a conversation and their answers.
import { html, useEffect, useRef, useState } from "../parts/html.js";
import { Confirm } from "../parts/dialog.js";
import { AnswerView } from "./chat_answer.js";
import { CodeDialog } from "./chat_code.js";
import { isBusy, revisionOf } from "./chat_conversation.js";
import { Edit } from "./chat_edit.js";
import { SentFiles } from "./chat_files.js";
import { removeTurn, resend, showTurn } from "./chat_state.js";
import { Versions } from "./chat_versions.js";
import { Welcome } from "./chat_welcome.js";
import { EndFollower } from "../parts/end_follower.js";

/** @typedef {import("./chat_conversation.js").Conversation} Conversation */
/** @typedef {import("./chat_conversation.js").Turn} Turn */

/** Pixels from the end at which it still counts as in sight. */
const END_PIXELS = 40;

/** @param {{conversation: Conversation}} props */
export function Turns({ conversation }) {
  revisionOf(conversation);
  const box = useRef(/** @type {HTMLElement | null} */ (null));
  const isAtEnd = useFollowedEnd(box);
  const isWide = conversation.models.length > 1 || conversation.turns.some((turn) => turn.answers.length > 1);
  return html`<div class="turns" ref=${box} tabindex="0" role="log" aria-live="off" aria-label="Conversation">
    <div class=${isWide ? "turns-inner wide" : "turns-inner"}>
      ${!conversation.turns.length && html`<${Welcome} conversation=${conversation} />`}
      ${conversation.turns.map((turn, at) => html`<${TurnView} key=${at} conversation=${conversation} turn=${turn} at=${at} />`)}
    </div>
    <p class="announced" role="status">${announcementOf(conversation)}</p>
    ${!isAtEnd && html`<button class="to-end" onClick=${() => box.current?.scrollTo({ top: box.current.scrollHeight })}>↓ To the end</button>`}
  </div>`;
}

/** What a screen reader says of the last answers: not their words as they come. @param {Conversation} conversation */
function announcementOf(conversation) {
  const last = conversation.turns.at(-1);
  if (!last) return "";
  if (isBusy(conversation)) return "Answering.";
  return last.answers.some((answer) => answer.state === "failed") ? "The answer failed." : "The answer is complete.";
}

/** Keeps the end of what grows in sight, as long as it is: a reader who has scrolled up stays there.
 * @param {{current: HTMLElement | null}} box */
function useFollowedEnd(box) {
  const [isAtEnd, setAtEnd] = useState(true);
  useEffect(() => {
    const element = /** @type {HTMLElement} */ (box.current);
    const end = new EndFollower(END_PIXELS);
    const onScroll = () => setAtEnd(end.scrolled(element));
    const observer = new ResizeObserver(() => setAtEnd(end.grown(element)));
    observer.observe(element);
    observer.observe(/** @type {Element} */ (element.firstElementChild));
    element.addEventListener("scroll", onScroll, { passive: true });
    return () => {
      observer.disconnect();
      element.removeEventListener("scroll", onScroll);
    };
  }, []);
  return isAtEnd;
}

/** @param {{conversation: Conversation, turn: Turn, at: number}} props */
function TurnView({ conversation, turn, at }) {
  revisionOf(conversation);
  // The id of the version that is edited.
  const [edited, setEdited] = useState("");
  const [isDeleted, setDeleted] = useState(false);
  const [codeOf, setCodeOf] = useState(-1);
  return html`<section class="turn" aria-label=${`Message ${at + 1}`}>
    <div class="asked">
      <${SentFiles} files=${turn.attachments} />
      ${edited === turn.id
        ? html`<${Edit} text=${turn.text} label="Edited message" action="Send again"
            onDone=${(/** @type {string | null} */ text) => (setEdited(""), text !== null && resend(at, text))} />`
        : html`${turn.text && html`<div class="said" dir="auto">${turn.text}</div>`}
            <div class="actions"><${Versions} versions=${turn.versions} isDisabled=${isBusy(conversation)} onShow=${(/** @type {number} */ number) => showTurn(at, number)} />
              <button class="quiet" onClick=${() => setEdited(turn.id)}>Edit</button>
              <button class="quiet" aria-label="Delete message" disabled=${isBusy(conversation)} onClick=${() => setDeleted(true)}>Delete</button></div>`}
    </div>
    <div class=${turn.answers.length > 1 ? "columns" : ""}>
      ${turn.answers.map(
        (answer, column) => html`<${AnswerView} key=${column} answer=${answer} at=${at} column=${column} onCode=${() => setCodeOf(column)} />`,
      )}
    </div>
    ${codeOf >= 0 && html`<${CodeDialog} conversation=${conversation} at=${at} column=${codeOf} onClose=${() => setCodeOf(-1)} />`}
    ${isDeleted && html`<${Confirm} title="Delete this message" action="Delete" isDangerous
      text=${`The message${turn.versions ? ", its other versions with what followed them," : ""} and its answers are deleted from this browser and from the mesh. Later messages stay.`}
      onDo=${async () => void removeTurn(at)} onClose=${() => setDeleted(false)} />`}
  </section>`;
}
