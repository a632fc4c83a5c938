// The kinds of documents that the settings edit: their fields as a form, and what a new one begins with.

/**
 * @typedef {{
 *   name: string, label: string, type: "text" | "area" | "number" | "flag" | "list" | "target" | "models" | "records",
 *   hint?: string, isWide?: boolean,
 * }} Field
 * A field of a document. `list`: texts, one in each line; `target`: what answers a request; `models`: models and pools, in lines.
 * `records`: objects, one in each line, as `field=value field=value`.
 * @typedef {{
 *   kind: string, plural: string, title: string, one: string, about: string, fields: Field[], empty: Record<string, any>, rights: string, afterDeletion: string,
 * }} Kind
 * `rights`: the resource whose `view` and `edit` it needs.
 */

/** @type {Field} */
const NAME = { name: "name", label: "Name", type: "text" };
/** @type {Field} */
const DESCRIPTION = { name: "description", label: "Description", type: "text", isWide: true };

/** @type {Kind[]} */
export const KINDS = [
  {
    kind: "agent", plural: "agents", title: "Agents", one: "agent", about: "A model or a pool with its own prompt and parameters: requested as agent/NAME.",
    rights: "models", afterDeletion: "Requests for it will be refused.",
    empty: { model: "" },
    fields: [
      NAME,
      { name: "model", label: "Model", type: "target", hint: "answers; or a pool" },
      { name: "pool", label: "Pool", type: "text", hint: "instead of a model" },
      DESCRIPTION,
      { name: "systemPrompt", label: "System prompt", type: "area", isWide: true },
      { name: "defaultParams.temperature", label: "Temperature", type: "number", hint: "default" },
      { name: "defaultParams.max_tokens", label: "Max output tokens", type: "number", hint: "no limit" },
      { name: "tools", label: "Tools", type: "list", hint: "one in each line" },
      { name: "tier", label: "Tier", type: "text", hint: "none" },
      { name: "platformPrompt", label: "Prepend platform prompt", type: "flag" },
    ],
  },
  {
    kind: "route", plural: "routes", title: "Routes", one: "route", about: "An ordered list of models for one kind of task: requested as route/NAME.",
    rights: "models", afterDeletion: "Requests for it will be refused.",
    empty: { candidates: [] },
    fields: [
      NAME,
      DESCRIPTION,
      { name: "candidates", label: "Candidates, best first", type: "models", hint: "a model or a pool in each line", isWide: true },
      { name: "budgetSeconds", label: "Budget (s)", type: "number", hint: "none" },
      { name: "keepAlive", label: "Keep alive", type: "text", hint: "default" },
      { name: "pinPrimary", label: "Always wait for the primary", type: "flag" },
    ],
  },
  {
    kind: "alias", plural: "aliases", title: "Aliases", one: "alias", about: "Another name of a model, a pool, an agent or a route.",
    rights: "models", afterDeletion: "Requests for it will be refused.",
    empty: { target: "" },
    fields: [
      NAME,
      { name: "pattern", label: "Pattern", type: "text", hint: "a name, or a prefix and *" },
      { name: "target", label: "Target", type: "target", hint: "a model, a pool, agent/NAME or route/NAME" },
      { name: "tenant", label: "Tenant", type: "text", hint: "every tenant" },
      { name: "defaultParams.temperature", label: "Default temperature", type: "number", hint: "none" },
      { name: "defaultParams.reasoning_effort", label: "Default reasoning effort", type: "text", hint: "none, minimal, low, medium or high" },
      { name: "forcedParams.temperature", label: "Forced temperature", type: "number", hint: "the caller's" },
      { name: "forcedParams.max_tokens", label: "Forced max output tokens", type: "number", hint: "the caller's" },
      { name: "removedParams", label: "Removed parameters", type: "list", hint: "one in each line" },
      DESCRIPTION,
    ],
  },
  {
    kind: "tenant", plural: "tenants", title: "Tenants", one: "tenant", about: "A tenant's share of scarce capacity, and its limits.",
    rights: "settings", afterDeletion: "weft.yaml applies to it again: without an entry, no limits and a weight of 1.",
    empty: {},
    fields: [
      NAME,
      { name: "weight", label: "Weight", type: "number", hint: "1, relative to other tenants" },
      { name: "maxInFlight", label: "Concurrent requests", type: "number", hint: "no limit" },
      { name: "maxPriority", label: "Highest priority", type: "text", hint: "high, normal or low" },
      { name: "allowRemote", label: "Remote models", type: "text", hint: "never, on_request or always" },
      DESCRIPTION,
      { name: "limits", label: "Limits", type: "records", hint: "one per line: window=minute requests=20 tokens=40000", isWide: true },
      { name: "unlimited", label: "No limits, even if weft.yaml has a default", type: "flag" },
      { name: "capture", label: "Capture prompts and answers, encrypted, for admins", type: "flag" },
    ],
  },
];

/** The kind of a path. @param {string} plural */
export const kindOf = (plural) => KINDS.find((each) => each.plural === plural);

/** The value of a field in the form: a text, or whether it is set. @param {Record<string, any>} document @param {Field} field */
export function valueOf(document, { name, type }) {
  const value = name.split(".").reduce((/** @type {any} */ part, step) => part?.[step], document);
  if (type === "flag") return value === true;
  if (type === "records") return typeof value === "string" ? value : (value ?? []).map(lineOf).join("\n");
  if (Array.isArray(value)) return value.join("\n");
  return value === undefined || value === null ? "" : String(value);
}

/** A copy of a document with another value of a field; an empty one leaves the field out.
 * @param {Record<string, any>} document @param {Field} field @param {string | boolean} given */
export function withValue(document, field, given) {
  const changed = structuredClone(document);
  const steps = field.name.split(".");
  const last = /** @type {string} */ (steps.pop());
  let owner = changed;
  for (const step of steps) owner = owner[step] ??= {};
  const value = parsed(field, given);
  if (value === undefined) delete owner[last];
  else owner[last] = value;
  return changed;
}

/** @param {Field} field @param {string | boolean} given @returns {any} */
function parsed({ name, type }, given) {
  if (typeof given === "boolean") return given;
  if (type === "list" || type === "models") {
    // A line that is being written may be empty; it is left out of what is sent.
    return given.split("\n").map((line) => line.trim());
  }
  // What is being written stays as it was written, and becomes objects when it is sent.
  if (type === "records") return given === "" ? undefined : given;
  if (given === "") return name === "name" ? "" : undefined;
  const number = Number(given);
  return type === "number" && Number.isFinite(number) ? number : given;
}

/** An object as a line. @param {Record<string, any>} record */
const lineOf = (record) => Object.entries(record).map(([name, value]) => `${name}=${value}`).join(" ");

/** The objects of lines such as `window=minute requests=20`; raises where a word is no field with its value. @param {string} text */
function recordsOf(text) {
  const lines = text.split("\n").map((line) => line.trim()).filter((line) => line);
  return lines.map((line) => Object.fromEntries(line.split(/\s+/).map((word) => {
    const [name, value] = [word.slice(0, word.indexOf("=")), word.slice(word.indexOf("=") + 1)];
    if (!word.includes("=") || !name || !value) throw new Error(`"${word}" is no field with its value, such as window=minute.`);
    return [name, /^\d+$/.test(value) ? Number(value) : value];
  })));
}

/** A document as it is sent: without empty lines of lists, and with the objects of lines.
 * @param {Kind} kind @param {Record<string, any>} document @returns {Record<string, any>} */
export function sendable(kind, document) {
  const written = new Set(kind.fields.filter(({ type }) => type === "records").map(({ name }) => name));
  return Object.fromEntries(
    Object.entries(document).map(([name, value]) => {
      if (written.has(name) && typeof value === "string") return [name, recordsOf(value)];
      return [name, Array.isArray(value) ? value.filter((each) => (each?.model ?? each) !== "") : value];
    }),
  );
}

/** What is declared of a document that the mesh shows. @param {Record<string, any>} shown */
export function declaredOf(shown) {
  const { status, ...declared } = shown;
  return declared;
}

/** Why a document cannot be changed here; "": it can. @param {Record<string, any> | undefined} shown */
export function fixedBecause(shown) {
  // A document of a tenant counts in place of what the file says.
  return shown?.kind === "alias" && shown.status?.source === "configured" ? "It is in the mesh's weft.yaml (registry.aliases): change it there, then run weft mesh reload." : "";
}

/** Whether a runner publishes it, so that declaring it takes it over. @param {Record<string, any> | undefined} shown */
export const isPublished = (shown) => shown?.status?.kind === "virtual" || shown?.status?.type === "virtual";
