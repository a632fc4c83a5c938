// The search over pages, models, conversations, requests and actions, and the list of shortcuts.
import { html, useEffect, useMemo, useRef, useState } from "./parts/html.js";
import { PAGES } from "./page_table.js";
import { Dialog } from "./parts/dialog.js";
import { Facts } from "./parts/widgets.js";
import { GROUPS, index, requestOf } from "./search_index.js";

/** @typedef {import("./search_index.js").Entry} Entry */

/** Entries of a group that are shown, beside all pages, until all are asked for. */
const SHOWN = 6;
/** Characters around the place where a text was found. */
const AROUND = 40;

/** The entries that have all words, by group, those with such a title first. @param {Entry[]} entries @param {string} typed
 * @param {string} wide the group of which all are shown @returns {[string, Entry[]][]} */
function matching(entries, typed, wide) {
  const words = typed.toLowerCase().split(/\s+/).filter(Boolean);
  const found = entries.filter(({ group, title, text = "", needsWords }) => {
    const all = `${title}\n${text}`.toLowerCase();
    return words.length ? words.every((word) => all.includes(word) || group.toLowerCase() === word) : !needsWords;
  });
  const whole = requestOf(typed.trim());
  if (whole && !found.some((entry) => entry.group === whole.group)) found.push(whole);
  const isNamed = (/** @type {Entry} */ { title }) => Number(title.toLowerCase() === typed.trim().toLowerCase());
  return GROUPS.map((group) => {
    const all = found.filter((entry) => entry.group === group).sort((left, right) => isNamed(right) - isNamed(left));
    const more = { id: `more ${group}`, group, title: `${all.length - SHOWN} more`, widens: true, open: () => {} };
    return [group, group === "Pages" || group === wide || all.length <= SHOWN ? all : [...all.slice(0, SHOWN), more]];
  });
}

/** The place of a text where a word is; "" where it is not. @param {string} text @param {string} typed */
function excerpt(text, typed) {
  const [word = ""] = typed.toLowerCase().split(/\s+/).filter(Boolean);
  const at = word ? text.toLowerCase().indexOf(word) : -1;
  if (at < 0) return "";
  const begin = Math.max(0, at - AROUND);
  return `${begin ? "…" : ""}${text.slice(begin, at + word.length + AROUND).replace(/\s+/g, " ")}…`;
}

/** @param {{onClose: () => void, onShortcuts: () => void}} props */
export function Search({ onClose, onShortcuts }) {
  const [typed, setTyped] = useState("");
  const [at, setAt] = useState(0);
  const [wide, setWide] = useState("");
  const [entries, setEntries] = useState(/** @type {Entry[]} */ ([]));
  const list = useRef(/** @type {HTMLElement | null} */ (null));
  useEffect(() => {
    let isGone = false;
    void index(onShortcuts, (more) => void (isGone || setEntries((before) => [...before, ...more])));
    return () => void (isGone = true);
  }, []);
  const groups = useMemo(() => matching(entries, typed, wide), [entries, typed, wide]);
  const found = groups.flatMap(([, each]) => each);
  const choose = (/** @type {Entry | undefined} */ entry) => {
    if (!entry) return;
    if (entry.widens) return setWide(entry.group);
    onClose();
    entry.open();
  };
  const onKeyDown = (/** @type {KeyboardEvent} */ event) => {
    if (event.key === "ArrowDown") setAt(Math.min(found.length - 1, at + 1));
    else if (event.key === "ArrowUp") setAt(Math.max(0, at - 1));
    else if (event.key === "Enter") choose(found[at]);
    else return;
    event.preventDefault();
  };
  useEffect(() => list.current?.querySelector("[aria-selected=true]")?.scrollIntoView({ block: "nearest" }), [at]);
  return html`<${Dialog} title="Search" isWide onClose=${onClose}>
    <input class="search-field" role="combobox" aria-label="Search" aria-expanded="true" aria-controls="search-list" aria-autocomplete="list" autofocus
      aria-activedescendant=${found[at] ? `search-${at}` : undefined} autocomplete="off" spellcheck=${false} value=${typed}
      placeholder="Pages, models, conversations, requests by ID, actions" onKeyDown=${onKeyDown}
      onInput=${(/** @type {any} */ event) => (setTyped(event.target.value), setAt(0), setWide(""))} />
    <div id="search-list" ref=${list} role="listbox" aria-label="Results" class="search-list">
      ${groups.filter(([, each]) => each.length).map(([group, each]) => html`<div key=${group} role="group" aria-label=${group}>
        <span class="faint" aria-hidden="true">${group}</span>
        ${each.map((entry) => {
          const number = found.indexOf(entry);
          const about = entry.about ?? excerpt(entry.text ?? "", typed);
          return html`<div key=${entry.id} id=${`search-${number}`} role="option" aria-selected=${number === at} onClick=${() => choose(entry)}>
            <bdi>${entry.title}</bdi>${about && html` <span class="faint">${about}</span>`}</div>`;
        })}</div>`)}
    </div>
    <p class="faint" role="status">${found.length ? "" : "Nothing found."}</p>
  </${Dialog}>`;
}

/** @param {{onClose: () => void}} props */
export function Shortcuts({ onClose }) {
  return html`<${Dialog} title="Keyboard shortcuts" onClose=${onClose}>
    <${Facts} facts=${[
      [html`<kbd>Ctrl</kbd> <kbd>K</kbd>`, "Search"],
      [html`<kbd>?</kbd>`, "Keyboard shortcuts"],
      [html`<kbd>Enter</kbd>`, "Send the message; queue it while an answer comes"],
      [html`<kbd>Shift</kbd> <kbd>Enter</kbd>`, "New line"],
      [html`<kbd>Esc</kbd>`, "Stop the answer; close a dialog"],
      ...PAGES.flatMap((page) => page.keys ?? []).map(([keys, does]) => [keys.map((key) => html`<kbd>${key}</kbd> `), does]),
    ].map(([keys, does]) => [does, keys])} />
  </${Dialog}>`;
}
