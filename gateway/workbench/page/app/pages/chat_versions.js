// Versions of a message with all that followed it, and of an answer: one is shown, the others stay beside it.
import { html } from "../parts/html.js";

/** @typedef {import("./chat_conversation.js").Turn} Turn */
/** @typedef {import("./chat_conversation.js").Answer} Answer */

/** Puts a new version in the place of `count` items of a list. @template {{versions?: (T[] | null)[]}} T
 * @param {T[]} list @param {number} at @param {T} item @param {number} count */
export function addVersion(list, at, item, count) {
  item.versions = [...withHidden(list.splice(at, count, item)), null];
}

/** Shows the version of that number in the place of `count` items. @template {{versions?: (T[] | null)[]}} T
 * @param {T[]} list @param {number} at @param {number} number @param {number} count */
export function showVersion(list, at, number, count) {
  const next = list[at].versions?.[number];
  if (!next) return;
  next[0].versions = withHidden(list.splice(at, count, ...next)).with(number, null);
}

/** All versions once what is shown is not any more. @template {{versions?: (T[] | null)[]}} T @param {T[]} shown */
function withHidden(shown) {
  const versions = shown[0].versions ?? [null];
  delete shown[0].versions;
  return versions.with(versions.indexOf(null), shown);
}

/** The messages of all versions. @param {Turn[]} turns @returns {Turn[]} */
export const allTurns = (turns) => turns.flatMap((turn) => [turn, ...(turn.versions ?? []).flatMap((tail) => allTurns(tail ?? []))]);

/** The answers of all versions. @param {Turn[]} turns @returns {Answer[]} */
export const allAnswers = (turns) => allTurns(turns).flatMap(({ answers }) => answers.flatMap((answer) => [answer, ...(answer.versions ?? []).flatMap((each) => each ?? [])]));

/** The number of the shown version, and the way to the others.
 * @param {{versions: unknown[] | undefined, isDisabled: boolean, onShow: (number: number) => void}} props */
export function Versions({ versions, isDisabled, onShow }) {
  if (!versions) return null;
  const at = versions.indexOf(null);
  const count = versions.length;
  return html`<span class="versions" role="group" aria-label="Versions">
    <button class="quiet" aria-label="Previous version" disabled=${isDisabled} onClick=${() => onShow((at + count - 1) % count)}>‹</button>
    <span>${at + 1}/${count}</span>
    <button class="quiet" aria-label="Next version" disabled=${isDisabled} onClick=${() => onShow((at + 1) % count)}>›</button></span>`;
}
