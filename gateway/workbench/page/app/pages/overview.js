// The overview: what the mesh has and does now.
import { html } from "../parts/html.js";
import { collection, useLive } from "../live.js";
import { LiveNote, State } from "../parts/widgets.js";
import { Table } from "../parts/table.js";

export function Page() {
  useLive("model");
  const models = collection("model").value;
  const rows = [...models.items.values()].sort((left, right) => left.name.localeCompare(right.name));
  return html`<h1>Overview</h1>
    <${LiveNote} live=${models} />
    ${models.isComplete &&
    html`<${Table} label="Models" rows=${rows} rowKey=${(/** @type {any} */ row) => row.name} empty="No model yet."
      columns=${[
        { title: "Model", cell: (/** @type {any} */ row) => row.name, sort: (/** @type {any} */ row) => row.name },
        { title: "State", cell: (/** @type {any} */ row) => html`<${State} value=${row.status?.state} />` },
      ]} />`}`;
}
