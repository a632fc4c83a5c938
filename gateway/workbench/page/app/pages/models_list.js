// The list of all models, with a filter, and the operations under way.
import { html, useMemo, useState } from "../parts/html.js";
import { collection } from "../live.js";
import { address, go } from "../navigation.js";
import { can } from "../session.js";
import { count, words } from "../parts/format.js";
import { dismiss, hasEnded, isBegunHere, OperationNote, allOperations } from "../parts/operations.js";
import { Table } from "../parts/table.js";
import { LiveNote } from "../parts/widgets.js";
import { DetachDialog } from "./models_actions.js";
import { AddDialog } from "./models_add.js";
import { Catalog } from "./models_catalog.js";
import { ChatLink, contextOf, memoryOf, memoryText, ModelState, poolOf, queueOf, searchText, stateOf, tagsOf, takes } from "./models_view.js";

const MAX_OPERATIONS = 10;

/** @param {{models: import("../live.js").Collection, query: URLSearchParams}} props */
export function ModelList({ models, query }) {
  const [isAdding, setAdding] = useState(false);
  const shown = allOperations().filter((each) => !hasEnded(each) || isBegunHere(each)).slice(0, MAX_OPERATIONS);
  const wanted = query.get("q") ?? "";
  const state = query.get("state") ?? "";
  const all = useMemo(
    () => [...models.items.values()].sort((left, right) => left.name.localeCompare(right.name, undefined, { numeric: true })),
    [models],
  );
  const hasCatalog = can("operations:create");
  const isCatalog = hasCatalog && (query.get("view") === "catalog" || (models.isComplete && !all.length));
  const parts = wanted.toLowerCase().split(/\s+/).filter(Boolean);
  const found = all.filter((model) => parts.every((part) => searchText(model).includes(part)));
  const rows = state ? found.filter((model) => stateOf(model) === state) : found;
  /** @param {Record<string, string>} changed */
  const choose = (changed) => go("models", { q: wanted, state, ...changed }, { replace: true });
  return html`<div class="row title"><h1>Models</h1>
      ${hasCatalog && !isCatalog && html`<button class="main" onClick=${() => setAdding(true)}>Add a model</button>`}</div>
    ${hasCatalog &&
    html`<nav class="tabs" aria-label="Models">
      <a href=${address("models")} aria-current=${isCatalog ? undefined : "page"}>Served</a>
      <a href=${address("models", { view: "catalog" })} aria-current=${isCatalog ? "page" : undefined}>Catalog</a></nav>`}
    <${Operations} operations=${shown} />
    ${!isCatalog && html`<${LiveNote} live=${models} />`}
    ${isCatalog && html`<${Catalog} />`}
    ${models.isComplete && !all.length && !hasCatalog && html`<p class="faint empty">No models yet. A key with operations:create can add one.</p>`}
    ${models.isComplete &&
    all.length > 0 &&
    !isCatalog &&
    html`<div class="row tools">
        <label class="inline grow">Filter <input type="search" class="grow" value=${wanted} placeholder="name, pool, runner, label"
          onInput=${(/** @type {any} */ event) => choose({ q: event.target.value })} /></label>
        <label class="inline">State <select value=${state} onChange=${(/** @type {any} */ event) => choose({ state: event.target.value })}>
          <option value="">all (${found.length})</option>
          ${stateCounts(found, state).map(([name, number]) => html`<option key=${name} value=${name}>${words(name)} (${number})</option>`)}
        </select></label>
        <span class="faint" role="status">${rows.length} of ${all.length}</span>
      </div>
      <${Table} label="Models" rows=${rows} rowKey=${(/** @type {any} */ row) => row.name} columns=${COLUMNS} height="calc(100vh - 11rem)"
        onOpen=${(/** @type {any} */ row) => go(`models/${row.name}`)}
        empty="No model matches the filter." />`}
    ${!isCatalog && html`<${Servers} />`}
    ${isAdding && html`<${AddDialog} onClose=${() => setAdding(false)} />`}`;
}

/** How many models are in each state; the chosen one also where none is. @param {any[]} models @param {string} chosen */
function stateCounts(models, chosen) {
  const counts = new Map(chosen ? [[chosen, 0]] : []);
  for (const model of models) counts.set(stateOf(model), (counts.get(stateOf(model)) ?? 0) + 1);
  return [...counts].sort(([left], [right]) => left.localeCompare(right));
}

/** @type {import("../parts/table.js").Column[]} */
const COLUMNS = [
  { title: "Model", cell: (row) => html`<a href=${address(`models/${row.name}`)}>${row.name}</a>`, sort: (row) => row.name },
  { title: "State", cell: (row) => html`<${ModelState} model=${row} />`, sort: stateOf },
  { title: "Slots", cell: slots, sort: (row) => row.status?.instance?.slotsUsed ?? -1, className: "number", hint: "busy / all" },
  { title: "Queue", cell: (row) => queueOf(row)?.waiting ?? "–", sort: (row) => queueOf(row)?.waiting ?? -1, className: "number", hint: "waiting for its pool" },
  { title: "Memory", cell: memoryText, sort: (row) => memoryOf(row).bytes, className: "number", hint: "in use, or ~ estimated for a load" },
  { title: "Context", cell: (row) => count(contextOf(row) || null), sort: contextOf, className: "number", hint: "tokens of one slot" },
  { title: "Capabilities", cell: (row) => takes(row).join(", ") || "–", sort: (row) => takes(row).join() },
  { title: "Pool", cell: (row) => poolOf(row) || "–", sort: poolOf },
  { title: "Runner", cell: (row) => row.status?.runner || "–", sort: (row) => row.status?.runner ?? "" },
  { title: "Chat", cell: (row) => html`<${ChatLink} model=${row} />` },
  { title: "Labels", cell: (row) => tagsOf(row).join(", ") || "–", sort: (row) => tagsOf(row).join(), className: "long" },
];

/** @param {any} row */
function slots(row) {
  const instance = row.status?.instance;
  return instance?.slotsTotal ? `${instance.slotsUsed} / ${instance.slotsTotal}` : "–";
}

/** What is under way, and what was begun here and has ended. @param {{operations: any[]}} props */
function Operations({ operations }) {
  if (!operations.length) return null;
  return html`<section class="panel operations" aria-label="Operations">
    ${operations.map((each) => html`<${OperationNote} key=${each.name} operation=${each} onDismiss=${isBegunHere(each) ? () => dismiss(each) : undefined} />`)}</section>`;
}

/** Servers that were attached while the mesh runs. */
function Servers() {
  const [chosen, setChosen] = useState("");
  const runners = [...collection("runner").value.items.values()];
  const servers = runners.flatMap((runner) => (runner.status?.attachedServers ?? []).map((/** @type {string} */ name) => ({ name, runner: runner.name })));
  if (!servers.length) return null;
  return html`<section class="panel"><h2>Attached servers</h2>
    ${servers.map(
      ({ name, runner }) => html`<div class="row" key=${name}><strong>${name}</strong><span class="faint grow">on ${runner}</span>
        ${can("operations:create") && html`<button onClick=${() => setChosen(name)}>Detach</button>`}</div>`,
    )}
    ${chosen && html`<${DetachDialog} name=${chosen} onClose=${() => setChosen("")} />`}
  </section>`;
}
