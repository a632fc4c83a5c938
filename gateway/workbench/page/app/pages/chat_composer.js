// Where a message is written, with its files.
import { html, useEffect, useRef, useState } from "../parts/html.js";
import { ErrorNote } from "../parts/widgets.js";
import { revisionOf } from "./chat_conversation.js";
import { draftKey, draftOf, keepDraft } from "./chat_drafts.js";
import { FileChips, read } from "./chat_files.js";
import { Fits } from "./chat_fit.js";
import { takes } from "./chat_models.js";
import { QueuedMessages, hasRoom } from "./chat_queue.js";
import { send, sendQueued, stopAll, unqueue } from "./chat_state.js";

/** @typedef {import("./chat_conversation.js").Conversation} Conversation */
/** @typedef {import("./chat_conversation.js").Attachment} Attachment */

const NAMES = { image: "pictures", audio: "recordings" };

/** @param {{conversation: Conversation, isBusy: boolean}} props */
export function Composer({ conversation, isBusy }) {
  revisionOf(conversation);
  const field = useRef(/** @type {HTMLTextAreaElement | null} */ (null));
  const chooser = useRef(/** @type {HTMLInputElement | null} */ (null));
  const key = draftKey(conversation);
  const [files, setShownFiles] = useState(/** @type {Attachment[]} */ (draftOf(key).files));
  const [problem, setProblem] = useState(/** @type {unknown} */ (null));
  const [isOver, setOver] = useState(false);
  const [text, setText] = useState(draftOf(key).text);
  useEffect(() => {
    if (field.current) field.current.value = draftOf(key).text;
    field.current?.focus();
  }, []);
  const setFiles = (/** @type {Attachment[]} */ chosen) => {
    setShownFiles(chosen);
    keepDraft(key, field.current?.value ?? "", chosen);
  };
  const refusal = (/** @type {"image" | "audio"} */ skill) => {
    const unable = conversation.models.find((model) => !takes(model, skill));
    return unable ? `${unable} does not support ${NAMES[skill]}.` : "";
  };
  const accepted = /** @type {("image" | "audio")[]} */ (["image", "audio"]).filter((skill) => !refusal(skill));
  const add = async (/** @type {File[]} */ given) => {
    try {
      const added = await read(given, refusal);
      setFiles([...draftOf(key).files, ...added]);
      setProblem(null);
    } catch (error) {
      setProblem(error);
    }
  };
  const submit = () => {
    const text = field.current?.value ?? "";
    if (!text.trim() && !files.length) return;
    if (!conversation.models.every(Boolean)) return setProblem("Choose a model first.");
    if (isBusy && !hasRoom(conversation)) return setProblem("The queue is full.");
    write("", []);
    setProblem(null);
    send(text, files);
  };
  const write = (/** @type {string} */ text, /** @type {Attachment[]} */ attached) => {
    if (field.current) field.current.value = text;
    setText(text);
    setFiles(attached);
  };
  /** A message that waits is written again, before what is written now. @param {number} at */
  const edit = (at) => {
    const message = unqueue(at);
    if (message) write([message.text, field.current?.value].filter(Boolean).join("\n"), [...message.attachments, ...files]);
    field.current?.focus();
  };
  const onInput = () => {
    setText(field.current?.value ?? "");
    keepDraft(key, field.current?.value ?? "", files);
  };
  const onKeyDown = (/** @type {KeyboardEvent} */ event) => {
    if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
    event.preventDefault();
    submit();
  };
  const onFiles = (/** @type {Event} */ event, /** @type {FileList | undefined} */ given) => {
    if (!given?.length) return;
    event.preventDefault();
    void add([...given]);
  };
  return html`<div class="composer"><${ErrorNote} error=${problem} /><${Fits} conversation=${conversation} text=${text} files=${files} />
    <${QueuedMessages} messages=${conversation.queued ?? []} isBusy=${isBusy} onSend=${sendQueued} onEdit=${edit} onRemove=${unqueue} /><div class=${isOver ? "field over" : "field"}
      onDragOver=${(/** @type {DragEvent} */ event) => (event.preventDefault(), setOver(true))} onDragLeave=${() => setOver(false)}
      onDrop=${(/** @type {DragEvent} */ event) => (event.preventDefault(), setOver(false), onFiles(event, event.dataTransfer?.files))}>
    <${FileChips} files=${files} onChange=${setFiles} />
    <textarea ref=${field} aria-label="Message" placeholder="Message" rows="1" dir="auto" onKeyDown=${onKeyDown} onInput=${onInput}
      onPaste=${(/** @type {ClipboardEvent} */ event) => onFiles(event, event.clipboardData?.files)}></textarea>
    <button class="quiet" title=${["text files", "PDFs", ...accepted.map((skill) => NAMES[skill])].join(", ")} onClick=${() => chooser.current?.click()}>Attach</button>
    <input ref=${chooser} type="file" hidden multiple aria-label="Files to attach" accept=${[...accepted.map((skill) => `${skill}/*`), "*/*"].join(",")}
      onChange=${(/** @type {any} */ event) => (void add([...event.target.files]), (event.target.value = ""))} />
    ${isBusy
      ? html`<button class="quiet" title="Enter" onClick=${submit}>Queue</button>
          <button class="main" title="Escape" onClick=${() => stopAll(conversation)}>Stop</button>`
      : html`<button class="main" title="Enter" onClick=${submit}>Send</button>`}
  </div></div>`;
}
