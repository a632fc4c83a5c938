// What the search looks through: read when it opens, in parts, as far as the key may see it.
import { get } from "./api.js";
import { applyTheme, go } from "./navigation.js";
import { words } from "./parts/format.js";
import { PAGES } from "./page_table.js";
import { can } from "./session.js";
import { start } from "./pages/chat_state.js";
import { loadAll } from "./pages/chat_store.js";
import { textOf } from "./pages/chat_conversation.js";

/** @typedef {{id: string, group: string, title: string, about?: string, text?: string, needsWords?: boolean, widens?: boolean, open: () => void}} Entry
 * `widens`: it stands for those of its group that are not shown. `text`: searched as well. `needsWords`: not shown before something is typed. */

export const GROUPS = ["Pages", "Actions", "Models", "Conversations", "Requests"];
const MAX_REQUESTS = 1000;
const PAGE = 1000;
/** Running requests, and those that ended. */
const STATES = ["", "ended"];

/** Gives all entries, as soon as they are there. @param {() => void} onShortcuts @param {(entries: Entry[]) => void} add */
export async function index(onShortcuts, add) {
  add([...pages(), ...actions(onShortcuts)]);
  // What cannot be read is not found: its own page says why.
  const found = [models(), chats(), conversations(), requests()].map((part) => part.catch(() => []));
  // Models and their chats are one group: its order does not depend on which answers first.
  await Promise.all([Promise.all(found.slice(0, 2)).then((lists) => add(lists.flat())), ...found.slice(2).map((part) => part.then(add))]);
}

/** @returns {Entry[]} */
const pages = () => {
  const found = PAGES.filter((page) => can(page.needs)).map(({ path, title }) => ({ id: `page ${path}`, group: "Pages", title, open: () => go(path) }));
  const waiting = { id: "page waiting", group: "Pages", title: "Waiting requests", about: "queue", text: "queue", needsWords: true, open: () => go("requests", { state: "waiting" }) };
  return can("inference:view") ? [...found, waiting] : found;
};

/** @param {() => void} onShortcuts @returns {Entry[]} */
function actions(onShortcuts) {
  const create = () => {
    start();
    go("chat");
  };
  const themes = [["", "System"], ["light", "Light"], ["dark", "Dark"]];
  /** @type {[string, () => void][]} */
  const named = [
    ...(can("inference:create") ? [/** @type {[string, () => void]} */ (["New conversation", create])] : []),
    ...themes.map(([theme, name]) => /** @type {[string, () => void]} */ ([`Theme: ${name}`, () => applyTheme(theme)])),
    ["Keyboard shortcuts", onShortcuts],
  ];
  return named.map(([title, open]) => ({ id: `action ${title}`, group: "Actions", title, open }));
}

/** @returns {Promise<Entry[]>} */
async function models() {
  if (!can("models:view")) return [];
  const items = [];
  for (let pageToken = ""; ; ) {
    const page = await get("/api/v1/models", { pageSize: PAGE, pageToken });
    items.push(...page.items);
    pageToken = page.nextPageToken;
    if (!pageToken) break;
  }
  return items.map((/** @type {any} */ { name, status }) => ({
    id: `model ${name}`, group: "Models", title: name, about: `model, ${words(status?.state)}`, needsWords: true, open: () => go(`models/${name}`),
  }));
}

/** The names that can be chatted with. @returns {Promise<Entry[]>} */
async function chats() {
  if (!can("inference:create")) return [];
  const { data } = await get("/v1/models");
  return data.filter((/** @type {any} */ { meta }) => meta.operations.includes("chat")).map((/** @type {any} */ { id, meta }) => ({
    id: `chat ${id}`, group: "Models", title: id, about: "chat", text: meta.members?.join(" "), needsWords: true, open: () => go("chat", { model: id }),
  }));
}

/** @returns {Promise<Entry[]>} */
async function conversations() {
  if (!can("inference:create")) return [];
  const all = await loadAll();
  return all.sort((left, right) => right.updatedAt - left.updatedAt).map(({ id, title, turns }) => ({
    id, group: "Conversations", title: title || "Untitled", open: () => go(`chat/${id}`),
    text: turns.flatMap((turn) => [turn.text, ...turn.answers.map(textOf)]).join("\n"),
  }));
}

/** A request that is older than those of the list, by its whole id. @param {string} id @returns {Entry | null} */
export const requestOf = (id) =>
  can("inference:view") && /^(req|task)-[\w-]{8,}$/.test(id) ? { id, group: "Requests", title: id, open: () => go(`requests/${id}`) } : null;

/** @returns {Promise<Entry[]>} */
async function requests() {
  if (!can("inference:view")) return [];
  const lists = await Promise.all(STATES.map((state) => get("/v1/requests", { limit: MAX_REQUESTS, state, allTenants: true })));
  return lists.flatMap((list) => list.items).map((/** @type {any} */ { requestId, askedModel, state }) => ({
    id: requestId, group: "Requests", title: requestId, about: [askedModel, state].filter(Boolean).join(", "), needsWords: true,
    open: () => go(`requests/${requestId}`),
  }));
}
