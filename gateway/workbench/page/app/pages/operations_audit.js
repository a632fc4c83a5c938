// The audit log, newest first: what was done by whom, with what follows as it happens.
import { html, useEffect, useRef, useState } from "../parts/html.js";
import { get } from "../api.js";
import { address } from "../navigation.js";
import { command } from "../parts/commands.js";
import { actor, clock, words } from "../parts/format.js";
import { Table } from "../parts/table.js";
import { Code, ErrorNote } from "../parts/widgets.js";

const PAGE = 100;
/** How long what follows one change is awaited before the log is read again. */
const SETTLE_MILLISECONDS = 300;

/** `operations`: a change of one is written into the log, too.
 * @param {{operations: import("../live.js").Collection}} props */
export function Audit({ operations }) {
  const [entries, setEntries] = useState(/** @type {any[] | null} */ (null));
  const [error, setError] = useState(/** @type {unknown} */ (null));
  const newest = useRef(0);
  const read = async () => {
    try {
      const head = newest.current || Math.max(0, (await get("/v1/admin/audit", { pageSize: 1 })).headSequence - PAGE);
      const found = (await get("/v1/admin/audit", { after: head, pageSize: 1000 })).items;
      newest.current = Math.max(newest.current, found.at(-1)?.sequence ?? head);
      // Two reads that run concurrently begin at the same entry: what the other has added is left out.
      setEntries((old) => [...found.filter((/** @type {any} */ one) => one.sequence > (old?.[0]?.sequence ?? 0)).reverse(), ...(old ?? [])]);
      setError(null);
    } catch (failure) {
      setError(failure);
    }
  };
  useEffect(() => {
    const timer = setTimeout(() => void read(), entries === null ? 0 : SETTLE_MILLISECONDS);
    return () => clearTimeout(timer);
  }, [operations]);
  const oldest = entries?.at(-1)?.sequence ?? 1;
  const older = async () => {
    const after = Math.max(0, oldest - 1 - PAGE);
    try {
      const found = (await get("/v1/admin/audit", { after, pageSize: oldest - 1 - after })).items;
      setEntries((old) => [...(old ?? []), ...found.reverse()]);
    } catch (failure) {
      setError(failure);
    }
  };
  return html`<p class="faint">Each entry contains the hash of the previous one. Verify the log:</p>
    <${Code} label="Command" text=${command("mesh", "audit", "verify")} />
    <${ErrorNote} error=${error} />
    ${entries === null && !error && html`<p class="faint" role="status">Loading…</p>`}
    ${entries && html`<${Table} label="Audit log" rows=${entries} rowKey=${(/** @type {any} */ row) => String(row.sequence)} columns=${COLUMNS}
      height="calc(100vh - 17rem)" empty="The log is empty." />`}
    ${entries && oldest > 1 && html`<p><button onClick=${older}>Show older</button></p>`}`;
}

/** @type {import("../parts/table.js").Column[]} */
const COLUMNS = [
  { title: "#", cell: (row) => row.sequence, sort: (row) => row.sequence, className: "number" },
  { title: "Time", cell: (row) => clock(row.time), sort: (row) => row.time },
  { title: "What", cell: (row) => row.event, sort: (row) => row.event },
  { title: "By", cell: (row) => actor(row.actor) || "–", sort: (row) => actor(row.actor), className: "long" },
  { title: "Operation", cell: operation, sort: (row) => row.operation ?? "" },
  { title: "Detail", cell: (row) => html`<span title=${row.detail}>${detail(row.detail)}</span>`, className: "long wide" },
];

/** @param {any} row */
function operation(row) {
  const id = (row.operation ?? "").replace(/^operations\//, "");
  return id ? html`<a href=${address(`operations/${id}`)}>${id}</a>` : "–";
}

/** The detail in words: names and values, without hashes. @param {string} text */
function detail(text) {
  try {
    return facts(JSON.parse(text)).join(", ");
  } catch {
    return text;
  }
}

/** @param {any} value @returns {string[]} */
function facts(value) {
  return Object.entries(value).flatMap(([name, each]) => {
    if (each === "" || each === null || name.endsWith("sha256")) return [];
    if (typeof each !== "object") return [`${words(name)}: ${each}`];
    const inner = facts(each);
    return Array.isArray(each) ? (each.length ? [`${words(name)}: ${each.join(" ")}`] : []) : name === "action" ? inner : [`${words(name)} (${inner.join(", ")})`];
  });
}
