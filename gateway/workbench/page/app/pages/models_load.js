// The dialog that loads a model with other settings than its own; its fields are the constraints of the model.
import { html, useState } from "../parts/html.js";
import { post, segment } from "../api.js";
import { collection } from "../live.js";
import { command } from "../parts/commands.js";
import { Dialog } from "../parts/dialog.js";
import { count } from "../parts/format.js";
import { follow } from "../parts/operations.js";
import { Code, ErrorNote } from "../parts/widgets.js";
import { isReady, poolOf } from "./models_view.js";

const CONTEXT = "context_tokens";

/** What was typed as a number where it is one: the server says what is wrong with the rest. @param {string} text */
export function numberOrText(text) {
  const number = Number(text);
  return text.trim() !== "" && Number.isFinite(number) ? number : text;
}

/**
 * @typedef {{
 *   contextTokens: string, quantization: string, memoryBudgetMb: string, keepAlive: string, pin: boolean, evictModel: string,
 *   replicas: string, parameters: Record<string, string>,
 * }} Settings
 */

/** @type {Settings} */
const UNCHANGED = { contextTokens: "", quantization: "", memoryBudgetMb: "", keepAlive: "", pin: false, evictModel: "", replicas: "", parameters: {} };

/** The body of a load. @param {Settings} settings @param {any[]} known the parameters that there are */
export function loadBody({ parameters, pin, quantization, evictModel, ...numbers }, known) {
  /** @type {Record<string, any>} */
  const body = Object.fromEntries(Object.entries(numbers).filter(([, value]) => value !== "").map(([name, value]) => [name, numberOrText(value)]));
  if (quantization) body.quantization = quantization;
  if (evictModel) body.evictModel = evictModel;
  if (pin) body.pin = true;
  const types = new Map(known.map((parameter) => [parameter.name, parameter.type]));
  const given = Object.entries(parameters).filter(([, value]) => value !== "");
  if (given.length) body.parameters = Object.fromEntries(given.map(([name, value]) => [name, typed(value, types.get(name))]));
  return body;
}

/** @param {string} value @param {string | undefined} type */
const typed = (value, type) => (type === "flag" ? value === "true" : type === "word" ? value : numberOrText(value));

/** The command of a load. @param {string} name @param {Settings} settings */
export function loadCommand(name, settings) {
  const sets = Object.entries(settings.parameters).filter(([, value]) => value !== "");
  return command(
    "load", name, ["--ctx", settings.contextTokens], ["--quantization", settings.quantization],
    ["--budget", settings.memoryBudgetMb && `${settings.memoryBudgetMb}MiB`], ["--keep-alive", settings.keepAlive], ["--pin", settings.pin],
    ["--evict", settings.evictModel], ["--replicas", settings.replicas],
    ...sets.map(([parameter, value]) => /** @type {[string, string]} */ (["--set", `${parameter}=${value}`])),
  );
}

/** @param {{model: any, admin: any, onClose: () => void}} props */
export function LoadDialog({ model, admin, onClose }) {
  const [settings, setSettings] = useState(UNCHANGED);
  const [error, setError] = useState(/** @type {unknown} */ (null));
  const [isBusy, setBusy] = useState(false);
  const { parameters = [], quantizations = [] } = admin?.constraints ?? {};
  const members = admin?.replicas?.members ?? [];
  // Replicas are of the pool: a load of a member by its name takes none.
  const name = settings.replicas ? poolOf(model) : model.name;
  /** @param {Partial<Settings>} changed */
  const change = (changed) => setSettings({ ...settings, ...changed });
  /** @param {Event} event */
  const submit = async (event) => {
    event.preventDefault();
    setBusy(true);
    try {
      follow(await post(`/v1/admin/models/${segment(name)}/load`, loadBody(settings, parameters)));
      onClose();
    } catch (failure) {
      setError(failure);
      setBusy(false);
    }
  };
  /** @param {"contextTokens" | "memoryBudgetMb" | "keepAlive" | "replicas"} field @param {string} label @param {string} placeholder @param {string} [hint] */
  const text = (field, label, placeholder, hint) => html`<label title=${hint}>${label} <input name=${field} value=${settings[field]} placeholder=${placeholder}
    autocomplete="off" onInput=${(/** @type {any} */ event) => change({ [field]: event.target.value })} /></label>`;
  const context = parameters.find((/** @type {any} */ each) => each.name === CONTEXT);
  const others = parameters.filter((/** @type {any} */ each) => each.name !== CONTEXT);
  return html`<${Dialog} title=${`Load ${model.name}`} onClose=${onClose} isWide>
    <form onSubmit=${submit} novalidate>
      <p class="faint">For this load only; empty fields keep the configured values. A loaded model is reloaded if options differ.</p>
      <div class="fields">
        ${text("contextTokens", "Context (tokens)", defaultText(context), rangeText(context))}
        ${quantizations.length > 0 &&
        html`<label>Quantization <select name="quantization" value=${settings.quantization}
          onChange=${(/** @type {any} */ event) => change({ quantization: event.target.value })}><option value="">Default</option>
          ${quantizations.map((/** @type {string} */ word) => html`<option key=${word} value=${word}>${word}</option>`)}</select></label>`}
        ${text("memoryBudgetMb", "Memory budget (MiB)", "Auto")}
        ${text("keepAlive", "Keep alive", "Default", "5m, 0, or -1 for no limit")}
        <label>Unload first <select name="evictModel" value=${settings.evictModel} onChange=${(/** @type {any} */ event) => change({ evictModel: event.target.value })}>
          <option value="">none</option>
          ${loadedBeside(model).map((other) => html`<option key=${other} value=${other}>${other}</option>`)}</select></label>
        ${members.length > 1 && text("replicas", `Members of ${poolOf(model)} to load`, "this one alone", `1 to ${members.length}`)}
        <label class="inline"><input type="checkbox" name="pin" checked=${settings.pin} onChange=${(/** @type {any} */ event) => change({ pin: event.target.checked })} />
          Pin: never evict it for another</label>
      </div>
      ${others.length > 0 &&
      html`<details><summary>Engine options (${others.length})</summary><div class="fields">
        ${others.map((/** @type {any} */ each) => html`<${Parameter} key=${each.name} parameter=${each} value=${settings.parameters[each.name] ?? ""}
          onChange=${(/** @type {string} */ value) => change({ parameters: { ...settings.parameters, [each.name]: value } })} />`)}</div></details>`}
      <${Code} label="Command" text=${loadCommand(name, settings)} />
      <${ErrorNote} error=${error} />
      <div class="buttons"><button type="button" onClick=${onClose}>Cancel</button>
        <button type="submit" class="main" disabled=${isBusy}>Load</button></div>
    </form>
  </${Dialog}>`;
}

/** Models that hold memory beside it: those of its runner. @param {any} model */
function loadedBeside(model) {
  const all = [...collection("model").value.items.values()];
  return all.filter((other) => other.name !== model.name && isReady(other) && other.status?.runner === model.status?.runner).map((other) => other.name);
}

/** @param {any} parameter */
const defaultText = (parameter) => (parameter?.default === undefined ? "engine default" : String(parameter.default));

/** The values that a parameter may have. @param {any} parameter */
export function rangeText(parameter) {
  if (!parameter) return "";
  if (parameter.type === "flag") return "true or false";
  if (parameter.type === "word") return parameter.words.join(", ");
  const [low, high] = [parameter.minimum, parameter.maximum].map((value) => (value === undefined ? "" : count(value)));
  return low || high ? `${low || "…"} to ${high || "…"}` : parameter.type;
}

/** One setting of an engine. @param {{parameter: any, value: string, onChange: (value: string) => void}} props */
function Parameter({ parameter, value, onChange }) {
  const words = parameter.type === "flag" ? ["true", "false"] : parameter.words;
  /** @param {any} event */
  const take = (event) => onChange(event.target.value);
  const field = words.length
    ? html`<select name=${parameter.name} value=${value} onChange=${take}><option value="">${defaultText(parameter)}</option>
        ${words.map((/** @type {string} */ word) => html`<option key=${word} value=${word}>${word}</option>`)}</select>`
    : html`<input name=${parameter.name} value=${value} placeholder=${defaultText(parameter)} autocomplete="off" onInput=${take} />`;
  return html`<label title=${rangeText(parameter)}><span class="mono">${parameter.name}</span>${field}<small class="faint">${parameter.description}</small></label>`;
}
