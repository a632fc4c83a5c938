// The list of documents of one kind.
import { html } from "../parts/html.js";
import { collection } from "../live.js";
import { address, go } from "../navigation.js";
import { can } from "../session.js";
import { State, LiveNote } from "../parts/widgets.js";
import { Table } from "../parts/table.js";

/** The address of the editor of a document. @param {import("./settings_kinds.js").Kind} kind @param {string} name */
export const editorOf = (kind, name) => ({ path: `settings/${kind.plural}/${name}`, query: name === "new" ? { name } : undefined });

/** What each kind shows beside its name. @type {Record<string, import("../parts/table.js").Column[]>} */
const COLUMNS = {
  agent: [
    { title: "Answers", cell: (agent) => agent.pool || agent.model, sort: (agent) => agent.pool || agent.model },
    { title: "Status", cell: (agent) => html`<${State} value=${agent.status?.state} />` },
    { title: "Description", cell: (agent) => agent.description, className: "wrap" },
  ],
  route: [
    { title: "Candidates", cell: (route) => (route.candidates ?? []).join(", "), className: "wrap" },
    { title: "Status", cell: (route) => html`<${State} value=${route.status?.state} />` },
    { title: "Description", cell: (route) => route.description, className: "wrap" },
  ],
  alias: [
    { title: "Pattern", cell: (alias) => html`<span class="mono">${alias.pattern || alias.name}</span>`, sort: (alias) => alias.pattern || alias.name },
    { title: "Target", cell: (alias) => alias.target, sort: (alias) => alias.target },
    { title: "Tenant", cell: (alias) => alias.tenant || "every tenant" },
    { title: "Preset", cell: presetOf, className: "wrap" },
    { title: "Source", cell: (alias) => alias.status?.source },
  ],
  tenant: [
    { title: "Weight", cell: (tenant) => tenant.weight ?? 1, sort: (tenant) => tenant.weight ?? 1 },
    { title: "Limits", cell: (tenant) => (tenant.limits ?? []).map(words).join(", ") || (tenant.unlimited ? "unlimited" : "-"), className: "wrap" },
    { title: "Source", cell: (tenant) => tenant.status?.source },
    { title: "Description", cell: (tenant) => tenant.description, className: "wrap" },
  ],
};

/** What an alias changes in its requests, in words. @param {any} alias */
function presetOf({ defaultParams = {}, forcedParams = {}, removedParams = [], providerHeaders = {} }) {
  const set = (/** @type {Record<string, unknown>} */ params, /** @type {string} */ sign) => Object.entries(params).map(([name, value]) => `${name} ${sign} ${JSON.stringify(value)}`);
  const headers = Object.keys(providerHeaders).map((name) => `header ${name}`);
  return [...set(defaultParams, "defaults to"), ...set(forcedParams, "="), ...removedParams.map((/** @type {string} */ name) => `no ${name}`), ...headers].join(", ");
}

/** A limit in words. @param {{window: string, requests?: number, tokens?: number, per?: string, model?: string}} limit */
function words({ window, requests, tokens, per, model }) {
  const most = [requests && `${requests} requests`, tokens && `${tokens} tokens`].filter(Boolean).join(" and ");
  return `${most} a ${window}${per && per !== "tenant" ? ` per ${per}` : ""}${model ? ` for ${model}` : ""}`;
}

/** @param {{kind: import("./settings_kinds.js").Kind}} props */
export function DocumentList({ kind }) {
  const live = collection(kind.kind).value;
  const rows = [...live.items.values()].sort((left, right) => left.name.localeCompare(right.name));
  const open = (/** @type {any} */ row) => {
    const { path, query } = editorOf(kind, row.name);
    go(path, query);
  };
  const name = { title: "Name", cell: (/** @type {any} */ row) => html`<a href=${address(editorOf(kind, row.name).path, editorOf(kind, row.name).query)}>${row.name}</a>`, sort: (/** @type {any} */ row) => row.name };
  return html`<div class="row tools"><span class="faint grow">${kind.about}</span>
      ${can(`${kind.rights}:edit`) && html`<button class="main" onClick=${() => go(`settings/${kind.plural}/new`)}>New ${kind.one}</button>`}</div>
    <${LiveNote} live=${live} />
    ${live.isComplete && html`<${Table} label=${kind.title} rows=${rows} rowKey=${(/** @type {any} */ row) => row.name} columns=${[name, ...COLUMNS[kind.kind]]} onOpen=${open}
      empty=${`There are no ${kind.title.toLowerCase()}.`} />`}`;
}
