// The choice of a model: every name that answers chats, searched by name, with its state and what it takes.
import { html, signal, useEffect, useId, useRef, useState } from "../parts/html.js";
import { get } from "../api.js";
import { keptName } from "../mesh.js";
import { can } from "../session.js";
import { collection, useLive } from "../live.js";
import { count } from "../parts/format.js";
import { State } from "../parts/widgets.js";

/**
 * @typedef {{
 *   id: string, kind: string, status: string, contextTokens: number, skills: string[] | null, isRemote: boolean, about: string,
 *   targets: string[], countsTokens: boolean,
 * }} Model
 * `skills`: null where they are not known. `targets`: the names that an alias or a route leads to. `about`: what it stands for, or its description.
 */

/** Names that answer chats, in the order of the mesh; null before they are known. @type {import("@preact/signals").Signal<Model[] | null>} */
export const models = signal(null);
/** Why they are not known. @type {import("@preact/signals").Signal<unknown>} */
export const modelsProblem = signal(null);

const SHOWN_AT_ONCE = 100;
/** Where this browser remembers the model that was last chosen or asked. */
const LAST = keptName("weft.chat.model");
/** What the list of names is made of. */
const KINDS = ["model", "agent", "route", "alias"];
/** How the names of agents begin. */
const AGENT = "agent/";
/** Changes within this time are one. */
const REFRESH_MILLISECONDS = 500;

/** @param {any} entry of GET /v1/models @returns {Model} */
function modelOf({ id, meta }) {
  const kind = meta.alias_of ? "alias" : meta.agent ? "agent" : meta.route ? "route" : (meta.members ?? []).length > 1 ? "pool" : "model";
  const targets = meta.alias_of ? [meta.alias_of] : (meta.candidates ?? []);
  const stands = meta.agent ? meta.model : targets.join(", ");
  const about = [stands && `for ${stands}`, meta.description].filter(Boolean).join(": ");
  return {
    id, kind, about, targets, countsTokens: meta.operations.includes("tokenize"), status: meta.status, contextTokens: meta.context_tokens, skills: meta.skills ?? null, isRemote: Boolean(meta.remote),
  };
}

export async function refreshModels() {
  try {
    const { data } = await get("/v1/models");
    models.value = data.filter((/** @type {any} */ entry) => entry.meta.operations.includes("chat")).map(modelOf);
    modelsProblem.value = null;
  } catch (error) {
    modelsProblem.value = error;
  }
}

/** @param {string} id */
export const remember = (id) => localStorage.setItem(LAST, id);

/** The model of a new conversation: the last one, else one that is loaded; "" before the names are known. */
export function usualModel() {
  const all = models.value ?? [];
  const found = all.find((model) => model.id === localStorage.getItem(LAST)) ?? all.find((model) => model.status === "active") ?? all[0];
  return found?.id ?? "";
}

/** Whether a model takes images or audio, as far as is known. @param {string} id @param {"image" | "audio"} skill */
export function takes(id, skill) {
  const found = models.value?.find((model) => model.id === id);
  return !found?.skills || found.skills.includes(skill);
}

/** Whether a name leads to an agent, as far as is known. @param {string} id @param {number} depth of names that lead to names @returns {boolean} */
export function leadsToAgent(id, depth = 4) {
  const targets = models.value?.find((model) => model.id === id)?.targets ?? [];
  return id.startsWith(AGENT) || (depth > 0 && targets.some((target) => leadsToAgent(target, depth - 1)));
}

/** The choice of one model. @param {{value: string, label: string, onChoose: (id: string) => void}} props */
export function ModelPicker({ value, label, onChoose }) {
  const [typed, setTyped] = useState(/** @type {string | null} */ (null));
  const [at, setAt] = useState(0);
  const [limit, setLimit] = useState(SHOWN_AT_ONCE);
  const list = useRef(/** @type {HTMLElement | null} */ (null));
  const id = useId();
  const isOpen = typed !== null;
  const all = isOpen ? matching(typed) : [];
  const found = all.slice(0, limit);
  const more = () => setLimit(limit + SHOWN_AT_ONCE);
  const chosen = models.value?.find((model) => model.id === value);
  const open = () => {
    setTyped("");
    setAt(0);
    setLimit(SHOWN_AT_ONCE);
    void refreshModels();
  };
  const choose = (/** @type {string} */ name) => {
    setTyped(null);
    if (!name) return;
    remember(name);
    onChoose(name);
  };
  const onKeyDown = (/** @type {KeyboardEvent} */ event) => {
    if (event.key === "ArrowDown" || event.key === "ArrowUp") {
      if (!isOpen) open();
      else if (event.key === "ArrowDown" && at + 1 === found.length && found.length < all.length) (more(), setAt(at + 1));
      else setAt(Math.max(0, Math.min(found.length - 1, at + (event.key === "ArrowDown" ? 1 : -1))));
    } else if (event.key === "Enter" && isOpen) choose(found[at]?.id ?? typed);
    else if (event.key === "Escape" && isOpen) setTyped(null);
    else return;
    event.preventDefault();
    event.stopPropagation();
  };
  useEffect(() => {
    list.current?.querySelector("[aria-selected=true]")?.scrollIntoView({ block: "nearest" });
  }, [at, isOpen]);
  return html`<div class="picker">
    <input role="combobox" aria-label=${label} aria-expanded=${isOpen} aria-controls=${`${id}-list`} aria-autocomplete="list"
      aria-activedescendant=${isOpen && found[at] ? `${id}-${at}` : undefined} autocomplete="off" spellcheck=${false}
      placeholder=${value || "Choose a model"} value=${typed ?? value} onFocus=${open} onClick=${() => !isOpen && open()}
      onInput=${(/** @type {any} */ event) => (setTyped(event.target.value), setAt(0))}
      onBlur=${() => choose(isName(typed) ? typed : "")} onKeyDown=${onKeyDown} />
    ${chosen && !isOpen && chosen.status !== "active" && html`<${State} value=${chosen.status} title="The first message will wake it." />`}
    <ul id=${`${id}-list`} ref=${list} role="listbox" aria-label=${label} hidden=${!isOpen}>
      ${found.map(
        (model, number) => html`<li key=${model.id} id=${`${id}-${number}`} role="option" aria-selected=${number === at}
          onPointerDown=${(/** @type {Event} */ event) => (event.preventDefault(), choose(model.id))}><${Choice} model=${model} /></li>`,
      )}
      ${found.length < all.length && html`<li role="option" aria-selected="false" onPointerDown=${(/** @type {Event} */ event) => (event.preventDefault(), more())}>Show more (${count(all.length - found.length)})</li>`}
      ${isOpen && !found.length && html`<li role="option" aria-disabled="true" aria-selected="false" class="faint">${typed ? `Enter asks for “${typed}”` : "No model supports chat."}</li>`}
    </ul>
  </div>`;
}

/** @param {{model: Model}} props */
function Choice({ model }) {
  const skills = (model.skills ?? []).filter((skill) => skill !== "text");
  return html`<span class="name">${model.id}</span>
    <span class="faint">${[
      model.kind !== "model" && model.kind, model.contextTokens && `${count(model.contextTokens)} context`, ...skills, model.isRemote && "remote",
    ].filter(Boolean).join(" · ")}</span>
    ${model.status !== "active" && html`<${State} value=${model.status} />`}
    ${model.about && html`<span class="about faint">${model.about}</span>`}`;
}

/** The models that a text may mean, that of exactly this name first. @param {string} typed */
function matching(typed) {
  const words = typed.toLowerCase().split(/\s+/).filter(Boolean);
  const all = [...(models.value ?? [])].sort((left, right) => Number(right.id === typed) - Number(left.id === typed));
  return all.filter((model) => words.every((word) => `${model.id} ${model.kind}`.toLowerCase().includes(word)));
}

/** Whether a text is a whole name, not a search. @param {string | null} typed @returns {typed is string} */
const isName = (typed) => Boolean(typed) && [typed, undefined].includes(matching(typed ?? "")[0]?.id);

/** Keeps the list of models up to date while it is shown: asked for again when a name or a state changes. */
export function ModelsWatch() {
  useLive(...(can("models:view") ? KINDS : []));
  const version = KINDS.map((kind) => [...collection(kind).value.items.values()].map(stateOf).sort().join(" ")).join("|");
  useEffect(() => {
    const timer = setTimeout(() => void refreshModels(), models.value === null ? 0 : REFRESH_MILLISECONDS);
    return () => clearTimeout(timer);
  }, [version]);
  return null;
}

/** @param {any} document */
const stateOf = ({ name, status }) => `${name}:${status?.state ?? ""}`;
