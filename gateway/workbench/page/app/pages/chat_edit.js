// A message or an answer while it is changed.
import { html, useEffect, useRef } from "../parts/html.js";

/** A text that is changed; null: it is not. @param {{text: string, label: string, action: string, onDone: (text: string | null) => void}} props */
export function Edit({ text, label, action, onDone }) {
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
  return html`<textarea ref=${field} aria-label=${label} dir="auto" onKeyDown=${onKeyDown} defaultValue=${text}></textarea>
    <div class="actions"><button class="quiet" onClick=${() => onDone(null)}>Cancel</button>
      <button onClick=${() => onDone(field.current?.value ?? "")}>${action}</button></div>`;
}
