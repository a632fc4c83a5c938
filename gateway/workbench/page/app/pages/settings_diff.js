// What is different between two states of a document, line by line, as `weft config diff` shows it.
import { html } from "../parts/html.js";

/** Lines of unchanged text around a change. */
const CONTEXT_LINES = 3;
/** Above this many pairs of lines what differs is shown as a whole, old and new. */
const MAX_PAIRS = 4_000_000;

/** @typedef {{sign: " " | "+" | "-" | "…", text: string}} DiffLine */

/** The lines of a document; none where there is none. @param {unknown} document */
const linesOf = (document) => (document ? JSON.stringify(document, null, 2).split("\n") : []);

/** The difference of two documents; empty where they are alike. @param {unknown} before @param {unknown} after @returns {DiffLine[]} */
export function difference(before, after) {
  const [old, now] = [linesOf(before), linesOf(after)];
  let start = 0;
  while (start < old.length && start < now.length && old[start] === now[start]) start += 1;
  let end = 0;
  while (end < old.length - start && end < now.length - start && old[old.length - 1 - end] === now[now.length - 1 - end]) end += 1;
  if (start === old.length && start === now.length) return [];
  const same = (/** @type {string} */ text) => /** @type {DiffLine} */ ({ sign: " ", text });
  return shortened([
    ...old.slice(0, start).map(same),
    ...changes(old.slice(start, old.length - end), now.slice(start, now.length - end)),
    ...old.slice(old.length - end).map(same),
  ]);
}

/** The longest common lines stay, by dynamic programming. @param {string[]} old @param {string[]} now @returns {DiffLine[]} */
function changes(old, now) {
  const gone = (/** @type {string} */ text) => /** @type {DiffLine} */ ({ sign: "-", text });
  const added = (/** @type {string} */ text) => /** @type {DiffLine} */ ({ sign: "+", text });
  if (old.length * now.length > MAX_PAIRS) return [...old.map(gone), ...now.map(added)];
  const width = now.length + 1;
  const common = new Uint32Array((old.length + 1) * width);
  for (let left = old.length - 1; left >= 0; left -= 1) {
    for (let right = now.length - 1; right >= 0; right -= 1) {
      const at = left * width + right;
      common[at] = old[left] === now[right] ? common[at + width + 1] + 1 : Math.max(common[at + width], common[at + 1]);
    }
  }
  /** @type {DiffLine[]} */
  const found = [];
  let [left, right] = [0, 0];
  while (left < old.length && right < now.length) {
    if (old[left] === now[right]) {
      found.push({ sign: " ", text: old[left] });
      left += 1;
      right += 1;
    } else if (common[(left + 1) * width + right] >= common[left * width + right + 1]) found.push(gone(old[left++]));
    else found.push(added(now[right++]));
  }
  return [...found, ...old.slice(left).map(gone), ...now.slice(right).map(added)];
}

/** Without the unchanged lines far from any change. @param {DiffLine[]} lines @returns {DiffLine[]} */
function shortened(lines) {
  const isNear = lines.map((_, at) => lines.slice(Math.max(0, at - CONTEXT_LINES), at + CONTEXT_LINES + 1).some((line) => line.sign !== " "));
  /** @type {DiffLine[]} */
  const found = [];
  lines.forEach((line, at) => {
    if (isNear[at]) found.push(line);
    else if (found.length && found[found.length - 1].sign !== "…") found.push({ sign: "…", text: "" });
  });
  return found.filter((line, at) => line.sign !== "…" || at < found.length - 1);
}

const WORDS = { "+": "added: ", "-": "removed: ", " ": "", "…": "" };
const CLASSES = { "+": "added", "-": "gone", " ": "", "…": "faint" };

/** A difference to read. @param {{label: string, before?: unknown, after?: unknown}} props */
export function Diff({ label, before, after }) {
  const lines = difference(before, after);
  if (!lines.length) return html`<p class="faint">No differences.</p>`;
  return html`<pre class="diff" tabindex="0" role="group" aria-label=${label}>${lines.map(
    ({ sign, text }, at) => html`<span key=${at} class=${CLASSES[sign]}><span class="unseen">${WORDS[sign]}</span>${sign} ${text}${"\n"}</span>`,
  )}</pre>`;
}

/** What was or would be done with documents, as an answer of `apply` has it. @param {{results: any[]}} props */
export function Results({ results }) {
  const changed = results.filter((result) => result.outcome !== "unchanged");
  if (!changed.length) return html`<p class="faint">No differences.</p>`;
  return changed.map(
    (result) => html`<section key=${`${result.kind}/${result.name}`} aria-label=${`${result.kind}/${result.name}`}>
      <h3>${result.kind}/${result.name} <span class="state">${result.outcome}</span></h3>
      <${Diff} label=${`Changes of ${result.kind}/${result.name}`} before=${result.before} after=${result.after} /></section>`,
  );
}
