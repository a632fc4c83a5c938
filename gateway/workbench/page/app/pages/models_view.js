// What the pages of models read out of a model's document: its state, its memory, what it takes.
import { html } from "../parts/html.js";
import { collection } from "../live.js";
import { address } from "../navigation.js";
import { can } from "../session.js";
import { bytes, toNumber } from "../parts/format.js";
import { State } from "../parts/widgets.js";

/** The state of a model: the phase of its engine, or that of its runner where that is gone. @param {any} model */
export function stateOf(model) {
  const { state, instance } = model.status ?? {};
  if (["active", "failed"].includes(state)) return instance?.phase ?? state;
  return state ?? "";
}

/** Whether requests are served immediately. @param {any} model */
export const isReady = (model) => ["ready", "active"].includes(stateOf(model));

/** Whether a load would start an engine. @param {any} model */
export const isAsleep = (model) => ["hibernating", "idle", "failed", "crash-loop"].includes(stateOf(model));

/** Memory of an instance: of accelerators what it was seen to hold, else what its lease says; without them, main memory;
 * 0: none, or unknown. @param {any} instance */
export function heldBytes(instance) {
  const memory = instance?.memory ?? {};
  return toNumber(memory.measuredBytes) || toNumber(memory.leasedBytes) || toNumber(memory.residentBytes) || 0;
}

/** The same of a model, else what it would take. @param {any} model */
export function memoryOf(model) {
  const memory = model.status?.instance?.memory ?? {};
  const held = heldBytes(model.status?.instance);
  return held ? { bytes: held, isHeld: true } : { bytes: toNumber(memory.estimatedBytes) || 0, isHeld: false };
}

/** That memory, or ~ what a load is estimated to take. @param {any} model */
export function memoryText(model) {
  const held = memoryOf(model);
  if (!held.bytes) return "–";
  return held.isHeld ? bytes(held.bytes) : html`<span class="faint">~ ${bytes(held.bytes)}</span>`;
}

/** The state of a model, and while it loads how far it is. @param {{model: any}} props */
export function ModelState({ model }) {
  const instance = model.status?.instance;
  const share = instance?.loadProgress;
  return html`<${State} value=${stateOf(model)} title=${instance?.detail} />${share !== undefined && html` <span class="faint">${Math.floor(share * 100)} %</span>`}`;
}

/** Opens a chat with a model that answers chats. @param {{model: any}} props */
export const ChatLink = ({ model }) =>
  can("inference:create") && model.operations?.includes("chat") && html`<a class="button" href=${address("chat", { model: model.name })} aria-label=${`Chat with ${model.name}`}>Chat</a>`;

/** Context of one slot in tokens; 0: unknown. @param {any} model */
export const contextOf = (model) => model.status?.instance?.contextTokens || model.contextTokens || 0;

/** @type {Record<string, string>} */
const NAMES = { image: "images" };

/** What a model takes, such as ["text", "images", "tools", "thinking"]; empty: unknown. @param {any} model */
export function takes(model) {
  const abilities = model.status?.instance?.abilities;
  const skills = abilities?.skills?.length ? abilities.skills : (model.skills ?? []);
  const thinks = abilities?.thinkingModes?.includes("enabled") ? ["thinking"] : [];
  return [...skills.map((/** @type {string} */ skill) => NAMES[skill] ?? skill), ...thinks];
}

/** Labels, tier and owner as short texts. @param {any} model */
export function tagsOf(model) {
  const labels = Object.entries(model.labels ?? {}).map(([key, value]) => `${key}=${value}`);
  return [...(model.tier ? [`tier=${model.tier}`] : []), ...labels, ...(model.owner ? [`owner=${model.owner}`] : [])];
}

/** The pool of a model; "" where the model is the pool. @param {any} model */
export const poolOf = (model) => (model.status?.pool && model.status.pool !== model.name ? model.status.pool : "");

/** The queue of a model: that of its pool; undefined: not known. Its page watches `queue`. @param {any} model */
export const queueOf = (model) => collection("queue").value.items.get(model.status?.pool || model.poolName || model.name);

/** @type {WeakMap<any, string>} */
const texts = new WeakMap();

/** All that a filter finds a model by, in lower case. @param {any} model */
export function searchText(model) {
  let text = texts.get(model);
  if (text === undefined) {
    const { runner, type, instance } = model.status ?? {};
    const parts = [model.name, poolOf(model), runner, type, stateOf(model), model.upstream, instance?.addedSource, ...takes(model), ...tagsOf(model)];
    texts.set(model, (text = parts.filter(Boolean).join("\n").toLowerCase()));
  }
  return text;
}
