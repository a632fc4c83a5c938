// The hosts of the runners: their processors and main memory, as the runners report them.
import { html } from "../parts/html.js";
import { collection } from "../live.js";
import { address } from "../navigation.js";
import { bytes } from "../parts/format.js";
import { Bar, LiveNote } from "../parts/widgets.js";
import { Table } from "../parts/table.js";

/** @typedef {{host: string, runners: string[], use: any}} Host */

/** Hosts of runners that are online, by name. @param {Iterable<any>} runners @returns {Host[]} */
function hostsOf(runners) {
  /** @type {Map<string, Host>} */
  const hosts = new Map();
  for (const { name, status = {} } of runners) {
    if (status.state !== "active") continue;
    const known = hosts.get(status.host) ?? { host: status.host, runners: /** @type {string[]} */ ([]), use: undefined };
    known.runners.push(name);
    known.use ??= status.hostUse;
    hosts.set(status.host, known);
  }
  return [...hosts.values()].sort((left, right) => left.host.localeCompare(right.host, undefined, { numeric: true }));
}

export function Hosts() {
  const live = collection("runner").value;
  return html`<section class="hosts"><h2>Hosts</h2><${LiveNote} live=${live} />
    ${live.isComplete && html`<${Table} label="Hosts" rows=${hostsOf(live.items.values())} rowKey=${(/** @type {Host} */ row) => row.host} height="24rem" columns=${COLUMNS} empty="No runner is online." />`}</section>`;
}

/** @param {string} label @param {number} used @param {number} total @param {string} text */
const bar = (label, used, total, text) => html`<${Bar} label=${label} total=${total} parts=${[{ name: "in use", value: used, tone: "seen", text }]} /><span class="faint">${text}</span>`;

/** @param {Host} row */
function cpu({ host, use }) {
  if (!use) return "–";
  return bar(`CPU of ${host}`, use.cpuUtilization, 1, `${Math.round(100 * use.cpuUtilization)} % of ${use.cpuCount} processors`);
}

/** @param {Host} row */
function memory({ host, use }) {
  if (!use) return "–";
  return bar(`Memory of ${host}`, Number(use.memoryUsedBytes), Number(use.memoryTotalBytes), `${bytes(use.memoryUsedBytes)} of ${bytes(use.memoryTotalBytes)}`);
}

/** @type {import("../parts/table.js").Column[]} */
const COLUMNS = [
  { title: "Host", cell: (row) => row.host, sort: (row) => row.host },
  { title: "CPU", cell: cpu, sort: (row) => row.use?.cpuUtilization ?? -1 },
  { title: "Memory", cell: memory, sort: (row) => Number(row.use?.memoryUsedBytes ?? -1) },
  { title: "Runners", className: "wrap", cell: (row) => row.runners.map((/** @type {string} */ name, /** @type {number} */ at) => html`${at ? ", " : ""}<a href=${address(`runners/${name}`)}>${name}</a>`) },
];
