// One field of a document as a control of the form.
import { html, useId } from "../parts/html.js";
import { collection } from "../live.js";
import { valueOf, withValue } from "./settings_kinds.js";

/** Lines that a list shows. */
const LIST_ROWS = 4;
const AREA_ROWS = 6;

/** @param {{field: import("./settings_kinds.js").Field, document: any, onChange: (document: any) => void, isFixed: boolean}} props */
export function FormField({ field, document, onChange, isFixed }) {
  const id = useId();
  const value = valueOf(document, field);
  /** @param {string | boolean} given */
  const change = (given) => onChange(withValue(document, field, given));
  if (field.type === "flag") {
    return html`<label class="inline"><input type="checkbox" name=${field.name} checked=${value} disabled=${isFixed}
      onChange=${(/** @type {any} */ event) => change(event.target.checked)} /> ${field.label}</label>`;
  }
  const isLong = ["area", "list", "models", "records"].includes(field.type);
  const control = isLong
    ? html`<textarea class="short" name=${field.name} rows=${field.type === "area" ? AREA_ROWS : LIST_ROWS} value=${value} placeholder=${field.hint} readonly=${isFixed}
        spellcheck=${field.type === "area"} onInput=${(/** @type {any} */ event) => change(event.target.value)}></textarea>`
    : html`<input name=${field.name} value=${value} placeholder=${field.hint} readonly=${isFixed} autocomplete="off" spellcheck=${false}
        list=${field.type === "target" ? id : undefined} inputmode=${field.type === "number" ? "decimal" : undefined}
        onInput=${(/** @type {any} */ event) => change(event.target.value)} />`;
  return html`<label class=${field.isWide ? "whole" : ""}>${field.label} ${control}</label>
    ${field.type === "target" && html`<datalist id=${id}>${targets(field.name === "target").map((target) => html`<option key=${target} value=${target} />`)}</datalist>`}`;
}

/** What answers requests: models and pools, and with `all` agents and routes. @param {boolean} all */
function targets(all) {
  const names = (/** @type {string} */ kind) => [...collection(kind).value.items.keys()];
  const models = [...new Set([...names("model"), ...names("pool")])].sort();
  return all ? [...models, ...names("agent").map((name) => `agent/${name}`), ...names("route").map((name) => `route/${name}`)] : models;
}
