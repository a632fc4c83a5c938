// Fields of forms that pages share.
import { html, useEffect, useState } from "./html.js";

/** A text that counts once Enter is pressed or the field is left. What is being typed stays when the page is drawn again,
 * as it is with everything that comes live.
 * @param {{label: string, value: string, onCommit: (value: string) => void, placeholder?: string}} props */
export function CommittedText({ label, value, onCommit, placeholder = "all" }) {
  const [draft, setDraft] = useState(value);
  useEffect(() => setDraft(value), [value]);
  return html`<label class="inline">${label} <input type="search" value=${draft} placeholder=${placeholder} spellcheck=${false}
    onInput=${(/** @type {any} */ event) => setDraft(event.target.value)}
    onChange=${(/** @type {any} */ event) => onCommit(event.target.value.trim())} /></label>`;
}
