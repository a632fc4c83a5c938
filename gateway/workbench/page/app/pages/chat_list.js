// The list of conversations that this browser keeps.
import { html, useEffect, useRef, useState } from "../parts/html.js";
import { Confirm } from "../parts/dialog.js";
import { ago } from "../parts/format.js";
import { attempt, notify } from "../parts/notices.js";
import { address, go } from "../navigation.js";
import { recentConversations } from "./chat_elsewhere.js";
import { remove, shown, start } from "./chat_state.js";
import { deleted, keep, kept, load, refresh } from "./chat_store.js";
import { parse, save } from "./chat_transfer.js";

/** From so many on they can be searched. */
const SEARCHED_FROM = 8;

/** @param {{onChosen: () => void}} props */
export function ConversationList({ onChosen }) {
  const [typed, setTyped] = useState("");
  const [asks, setAsks] = useState(false);
  const [elsewhere, setElsewhere] = useState(/** @type {import("./chat_store.js").Summary[]} */ ([]));
  const file = useRef(/** @type {HTMLInputElement | null} */ (null));
  useEffect(() => void refresh(), []);
  const words = typed.toLowerCase();
  const others = elsewhere.filter((other) => !deleted.has(other.id) && kept.value.every((each) => each.id !== other.id));
  const found = kept.value.filter((each) => (each.title ?? "").toLowerCase().includes(words) || each.models.some((model) => model.includes(words)));
  const create = () => {
    start();
    go("chat");
    onChosen();
  };
  const saveAll = async () => {
    const all = await Promise.all(kept.value.map((each) => load(each.id)));
    save(all.filter((each) => each !== null), "weft conversations");
  };
  const read = async (/** @type {Event} */ event) => {
    const field = /** @type {HTMLInputElement} */ (event.target);
    const chosen = field.files?.[0];
    if (!chosen) return;
    await attempt(async () => {
      const conversations = parse(await chosen.text());
      for (const conversation of conversations) await keep(conversation);
      notify(`${conversations.length} ${conversations.length === 1 ? "conversation" : "conversations"} imported.`);
    });
    field.value = "";
  };
  return html`<button onClick=${create}>New conversation</button>
    ${kept.value.length >= SEARCHED_FROM &&
    html`<input type="search" aria-label="Search conversations" placeholder="Search" value=${typed} onInput=${(/** @type {any} */ event) => setTyped(event.target.value)} />`}
    <p class="faint">Stored in this browser; prompts and answers on the mesh too, by default for 7 days.</p>
    <${Links} summaries=${found} onChosen=${onChosen} />
    <details onToggle=${(/** @type {any} */ event) => event.target.open && void attempt(async () => setElsewhere(await recentConversations()))}>
      <summary>From other browsers</summary><${Links} summaries=${others} onChosen=${onChosen} />
      ${!others.length && html`<p class="faint">None.</p>`}</details>
    <div class="actions">
      <button class="quiet" onClick=${() => file.current?.click()}>Import</button>
      <input ref=${file} type="file" accept=".json,application/json" hidden aria-label="File of conversations" onChange=${read} />
      ${kept.value.length > 0 && html`<button class="quiet" onClick=${() => void attempt(saveAll)}>Export all</button>
        <button class="quiet" onClick=${() => setAsks(true)}>Delete all</button>`}
    </div>
    ${asks && html`<${Confirm} title="Delete all conversations" action="Delete all" isDangerous onClose=${() => setAsks(false)}
      text=${`${kept.value.length} conversations are deleted from this browser, and their answers from the mesh. There is no other copy.`}
      onDo=${() => remove(...kept.value.map((each) => each.id))} />`}`;
}

/** @param {{summaries: import("./chat_store.js").Summary[], onChosen: () => void}} props */
function Links({ summaries, onChosen }) {
  return html`<ul>
    ${summaries.map(
      (each) => html`<li key=${each.id}><a href=${address(`chat/${each.id}`)} aria-current=${each.id === shown.value.id ? "page" : undefined} onClick=${onChosen}
        title=${`${each.models.join(", ")}, ${ago(each.updatedAt)}`}><bdi>${each.title || "Untitled"}</bdi></a></li>`,
    )}
  </ul>`;
}
