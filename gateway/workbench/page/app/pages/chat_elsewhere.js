// Conversations as the mesh has them: what another browser asked is rebuilt from the tasks of its answers.
import { get, segment } from "../api.js";
import { can, caller } from "../session.js";
import { defaultOptions, newAnswer, newConversation, newId } from "./chat_conversation.js";
import { withoutFiles } from "./chat_text_files.js";

/** @typedef {import("./chat_conversation.js").Conversation} Conversation */
/** @typedef {import("./chat_conversation.js").Turn} Turn */

const PATH = "/api/v1/inference-tasks";
/** Tasks of a page of the list. */
const PAGE = 1000;

/** The newest answers of this caller's conversations, newest first. @param {number} limit of tasks that are read @returns {Promise<any[]>} */
async function tasksOf(limit) {
  if (!can("inference:view")) return [];
  const { data } = await get(PATH, { limit, caller: caller.value?.name });
  return data.filter((/** @type {any} */ task) => task.metadata?.conversation);
}

/** All tasks of this caller, newest first. @returns {AsyncGenerator<any>} */
export async function* tasksOfCaller() {
  if (!can("inference:view")) return;
  let token = "";
  do {
    const { data, next_page_token: next } = await get(PATH, { limit: PAGE, caller: caller.value?.name, page_token: token });
    yield* data;
    token = next ?? "";
  } while (token);
}

/** The conversations with recent answers. @returns {Promise<import("./chat_store.js").Summary[]>} */
export async function recentConversations() {
  const newest = new Map((await tasksOf(200)).reverse().map((task) => [task.metadata.conversation, task]));
  return [...newest].map(([id, { metadata, model, created_at: time }]) => ({
    id, title: metadata.title ?? "", models: [model], updatedAt: Date.parse(time), chars: 0,
  }));
}

/** A conversation up to its newest answer, which is not read yet; null: the mesh has none of this caller.
 * @param {string} id @param {number} limit of tasks that are searched @returns {Promise<Conversation | null>} */
export async function fetchConversation(id, limit) {
  const tasks = (await tasksOf(limit)).filter((task) => task.metadata.conversation === id);
  const { turn, title = "" } = tasks[0]?.metadata ?? {};
  // A column that was asked again has several: the newest counts.
  const columns = new Map(tasks.filter((task) => task.metadata.turn === turn).reverse().map((task) => [task.metadata.column, task]));
  const found = await Promise.all([...columns.keys()].sort().map((column) => get(`${PATH}/${segment(columns.get(column).id)}`, { body: true })));
  if (!found.length || !found.every((task) => task.body)) return null;
  const rebuilt = newConversation(found.map((task) => task.body.model), optionsOf(found[0].body));
  const all = found.map(turnsOf);
  const turns = all[0].map((first, at) => ({ ...first, answers: all.flatMap((each) => each[at]?.answers ?? []) }));
  turns[turns.length - 1].id = turn;
  return { ...rebuilt, id, title, turns, updatedAt: Date.parse(tasks[0].created_at) };
}

/** The turns of one model. @param {any} task @returns {Turn[]} */
function turnsOf({ id, created_at: time, body: { model, messages } }) {
  /** @type {Turn[]} */
  const turns = [];
  const prefix = messages.at(-1).role === "assistant" ? messages.at(-1).content : "";
  for (const { role, content } of prefix ? messages.slice(0, -1) : messages) {
    if (role === "user") turns.push({ id: newId("turn-"), ...askedOf(content), answers: [] });
    if (role !== "assistant") continue;
    const parts = [{ kind: /** @type {"text"} */ ("text"), text: content }];
    turns.at(-1)?.answers.push({ ...newAnswer(model), requestId: "", isSubmitted: true, state: "complete", parts, isReceiptSought: true });
  }
  turns.at(-1)?.answers.push({ ...newAnswer(model, prefix), taskId: id, requestId: id, isSubmitted: true, askedAt: Date.parse(time) });
  return turns;
}

/** What `contentOf` has written. @param {string | any[]} content @returns {Pick<Turn, "text" | "attachments">} */
function askedOf(content) {
  const written = typeof content === "string" ? content : (content.find((part) => part.type === "text")?.text ?? "");
  const { text, files } = withoutFiles(written);
  if (typeof content === "string") return { text, attachments: files };
  const media = content.filter((part) => part.type !== "text").map(({ image_url: image, input_audio: audio }) => {
    const type = image ? (/^data:([^;,]*)/.exec(image.url)?.[1] ?? "") : `audio/${audio.format === "mp3" ? "mpeg" : audio.format}`;
    const data = image ? image.url : `data:${type};base64,${audio.data}`;
    const kind = /** @type {"image" | "audio"} */ (image ? "image" : "audio");
    return { kind, name: image ? kind : `audio.${audio.format}`, type, bytes: Math.floor(data.length * 0.75), data };
  });
  return { text, attachments: [...files, ...media] };
}

/** @param {any} body @returns {import("./chat_conversation.js").Options} */
function optionsOf({ messages, temperature = "", max_tokens: maxTokens = "", enable_thinking: thinking, allow_remote: allowRemote = false }) {
  const system = messages[0]?.role === "system" ? messages[0].content : "";
  const options = { ...defaultOptions(), system, temperature: String(temperature), maxTokens: String(maxTokens), allowRemote };
  return { ...options, thinking: thinking === undefined ? "" : thinking ? "on" : "off" };
}
