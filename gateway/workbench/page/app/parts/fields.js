// Fields of forms that pages share.
import { html, useEffect, useRef, useState } from "./html.js";
import { Icon } from "./icons.js";

/** A value and what is typed in its place, which stays when the page is drawn again, as it is with everything that comes live.
 * @param {string} value @returns {[string, (draft: string) => void]} */
function useDraft(value) {
  const [draft, setDraft] = useState(value);
  useEffect(() => setDraft(value), [value]);
  return [draft, setDraft];
}

/** A text that counts once Enter is pressed or the field is left.
 * @param {{label: string, value: string, onCommit: (value: string) => void, placeholder?: string}} props */
export function CommittedText({ label, value, onCommit, placeholder = "all" }) {
  const [draft, setDraft] = useDraft(value);
  return html`<label class="inline">${label} <input type="search" value=${draft} placeholder=${placeholder} spellcheck=${false}
    onInput=${(/** @type {any} */ event) => setDraft(event.target.value)}
    onChange=${(/** @type {any} */ event) => onCommit(event.target.value.trim())} /></label>`;
}

/** A day, written as the mesh writes it, "2026-11-25", or chosen in the browser's calendar.
 * @param {{label: string, value: string, onCommit: (value: string) => void}} props */
export function DateField({ label, value, onCommit }) {
  const calendar = useRef(/** @type {HTMLInputElement | null} */ (null));
  const [isWrong, setWrong] = useState(false);
  const [draft, setDraft] = useDraft(value);
  const commit = (/** @type {any} */ event) => {
    const day = event.target.value.trim();
    const isDay = !day || (/^\d{4}-\d{2}-\d{2}$/.test(day) && !Number.isNaN(Date.parse(day)));
    setWrong(!isDay);
    setDraft(day);
    if (isDay) onCommit(day);
  };
  return html`<span class="date"><label class="inline">${label} <input value=${draft} placeholder="YYYY-MM-DD" maxlength="10" aria-invalid=${isWrong}
      onInput=${(/** @type {any} */ event) => setDraft(event.target.value)} onChange=${commit} /></label>
    <button class="quiet" aria-label=${`${label}: calendar`} onClick=${() => calendar.current?.showPicker()}><${Icon} name="calendar" /></button>
    <input ref=${calendar} type="date" class="picker" tabindex="-1" aria-hidden="true" value=${value} onChange=${commit} />
    ${isWrong && html`<span class="problem" role="alert">Not a day: write it as YYYY-MM-DD.</span>`}</span>`;
}
