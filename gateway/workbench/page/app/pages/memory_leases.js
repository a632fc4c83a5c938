// The leases of a host's memory: who holds them, and the release of those of programs.
import { html, useState } from "../parts/html.js";
import { remove, segment } from "../api.js";
import { collection } from "../live.js";
import { address } from "../navigation.js";
import { can } from "../session.js";
import { command } from "../parts/commands.js";
import { Confirm } from "../parts/dialog.js";
import { ago, bytes, clock, words } from "../parts/format.js";
import { notify } from "../parts/notices.js";
import { Table } from "../parts/table.js";
import { Code, State } from "../parts/widgets.js";

/** @param {{host: any}} props */
export function Leases({ host }) {
  const [chosen, setChosen] = useState(/** @type {any} */ (null));
  const columns = [
    ...COLUMNS,
    ...(can("runners:edit") && host.leases.some(isReleasable)
      ? [{ title: "Action", cell: (/** @type {any} */ lease) => isReleasable(lease) && html`<button onClick=${() => setChosen(lease)}>Release</button>` }]
      : []),
  ];
  return html`<h3>Leases</h3>
    <${Table} label=${`Leases of ${host.host}`} rows=${host.leases} columns=${columns} rowKey=${(/** @type {any} */ lease) => lease.leaseId}
      height="22rem" empty="No leases: no model is loaded on this host, and no program has leased memory." />
    ${chosen && html`<${Release} lease=${chosen} onClose=${() => setChosen(null)} />`}`;
}

/** The lease of a model ends with an unload. @param {any} lease */
const isReleasable = (lease) => lease.holderKind === "program" && lease.state !== "releasing";

/** @param {any} lease */
const reservedBytes = (lease) => Object.values(lease.bytesByDevice ?? {}).reduce((sum, value) => sum + Number(value), 0);

/** @type {import("../parts/table.js").Column[]} */
const COLUMNS = [
  { title: "For", cell: purpose, sort: (lease) => lease.purpose, className: "long" },
  { title: "Holder", cell: (lease) => `${lease.holder}${lease.holderKind === "program" ? " (program)" : ""}`, sort: (lease) => lease.holder },
  { title: "Reserved", cell: (lease) => bytes(reservedBytes(lease)), sort: reservedBytes, className: "number" },
  { title: "In use", cell: (lease) => bytes(lease.seenBytes) || "–", sort: (lease) => Number(lease.seenBytes ?? -1), className: "number", hint: "memory last observed in use by its processes" },
  { title: "Device", cell: (lease) => Object.keys(lease.bytesByDevice ?? {}).join(", ") },
  { title: "State", cell: (lease) => html`<${State} value=${lease.state} />${lease.pinned && html` <span class="faint">pinned</span>`}`, sort: (lease) => lease.state },
  { title: "Running", cell: (lease) => lease.activeRequests || "–", sort: (lease) => lease.activeRequests, className: "number", hint: "running requests" },
  { title: "Priority", cell: (lease) => words(lease.priority), sort: (lease) => lease.priority },
  { title: "Since", cell: (lease) => html`<span title=${clock(lease.createdAt)}>${ago(lease.createdAt)}</span>`, sort: (lease) => lease.createdAt ?? "" },
];

/** @param {any} lease */
function purpose(lease) {
  const isModel = lease.holderKind === "runner" && collection("model").value.items.has(lease.purpose);
  return isModel ? html`<a href=${address(`models/${lease.purpose}`)}>${lease.purpose}</a>` : lease.purpose;
}

/** @param {{lease: any, onClose: () => void}} props */
function Release({ lease, onClose }) {
  const release = async () => {
    await remove(`/v1/admin/leases/${segment(lease.leaseId)}`);
    notify(`${lease.purpose} has lost its lease. The memory is free when its processes have ended.`);
  };
  return html`<${Confirm} title=${`Release: ${lease.purpose}`} action="Release" isDangerous onDo=${release} onClose=${onClose}
    text=${html`<p><strong>${lease.holder}</strong> holds ${bytes(reservedBytes(lease))}. It loses its lease:
        <code>weft mesh lease acquire</code> then ends its command.</p>
      <${Code} label="Command" text=${command("mesh", "lease", "release", lease.leaseId)} />`} />`;
}
