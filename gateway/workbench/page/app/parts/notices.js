// Notices: short messages about what was done or refused, also read out by screen readers.
import { html } from "./html.js";
import { signal } from "@preact/signals";

const SHOWN_MILLISECONDS = 8000;
const MAX_NOTICES = 4;
let lastId = 0;

/** @type {import("@preact/signals").Signal<{id: number, text: string, isError: boolean}[]>} */
const notices = signal([]);

/** Shows a notice, in place of one with the same text. @param {string} text @param {{isError?: boolean}} [how] */
export function notify(text, { isError = false } = {}) {
  const id = ++lastId;
  const others = notices.value.filter((notice) => notice.text !== text);
  notices.value = [...others, { id, text, isError }].slice(-MAX_NOTICES);
  // An error stays until it is dismissed.
  if (!isError) setTimeout(() => dismiss(id), SHOWN_MILLISECONDS);
}

/** Does something that may be refused; a refusal is shown. Returns whether it was done.
 * @param {() => Promise<unknown>} action @param {string} [done] */
export async function attempt(action, done = "") {
  try {
    await action();
  } catch (error) {
    notify(error instanceof Error ? error.message : String(error), { isError: true });
    return false;
  }
  if (done) notify(done);
  return true;
}

/** @param {number} id */
function dismiss(id) {
  notices.value = notices.value.filter((notice) => notice.id !== id);
}

export function Notices() {
  return html`<div class="notices" role="status" aria-live="polite">
    ${notices.value.map(
      ({ id, text, isError }) => html`<div key=${id} class=${isError ? "notice error" : "notice"}>
        <span>${text}</span>
        <button class="quiet" aria-label="Dismiss" onClick=${() => dismiss(id)}>×</button>
      </div>`,
    )}
  </div>`;
}
