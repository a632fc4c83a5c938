// The list of all runners, how another machine joins, and the tokens with which it may.
import { html, useEffect, useState } from "../parts/html.js";
import { get, remove, segment } from "../api.js";
import { address, go } from "../navigation.js";
import { can } from "../session.js";
import { command } from "../parts/commands.js";
import { Confirm } from "../parts/dialog.js";
import { ago, clock } from "../parts/format.js";
import { Table } from "../parts/table.js";
import { Code, ErrorNote, LiveNote, State } from "../parts/widgets.js";
import { devicesOf, modelsText, slotsOf, stateOf } from "./runners.js";
import { JoinDialog } from "./runners_join.js";

/** @param {{runners: import("../live.js").Collection}} props */
export function RunnerList({ runners }) {
  const [isJoining, setJoining] = useState(false);
  const [changes, setChanges] = useState(0);
  const rows = [...runners.items.values()].sort((left, right) => left.name.localeCompare(right.name, undefined, { numeric: true }));
  const close = () => {
    setJoining(false);
    setChanges(changes + 1);
  };
  return html`<div class="row title"><h1>Runners</h1>
      ${can("runners:create") && html`<button class="main" onClick=${() => setJoining(true)}>Join a machine</button>`}</div>
    <${LiveNote} live=${runners} />
    ${runners.isComplete &&
    html`<${Table} label="Runners" rows=${rows} rowKey=${(/** @type {any} */ row) => row.name} columns=${COLUMNS} onOpen=${(/** @type {any} */ row) => go(`runners/${row.name}`)}
      empty="No runners yet. Join a machine with one command." />`}
    <${Tokens} changes=${changes} />
    ${isJoining && html`<${JoinDialog} runners=${runners} onClose=${close} />`}`;
}

/** @type {import("../parts/table.js").Column[]} */
const COLUMNS = [
  { title: "Runner", cell: (row) => html`<a href=${address(`runners/${row.name}`)}>${row.name}</a>`, sort: (row) => row.name },
  { title: "State", cell: (row) => html`<${State} value=${stateOf(row)} title=${row.status?.conditions?.map((/** @type {any} */ each) => each.message).join(" ")} />`, sort: stateOf },
  { title: "Host", cell: (row) => row.status?.host || "–", sort: (row) => row.status?.host ?? "" },
  { title: "Joined", cell: (row) => (row.status?.link === "dial-out" ? "through the relay" : "directly"), sort: (row) => row.status?.link ?? "" },
  { title: "Models", cell: modelsText, sort: (row) => row.status?.instances?.length ?? 0 },
  { title: "Slots", cell: (row) => `${slotsOf(row).used} / ${slotsOf(row).total}`, className: "number", hint: "busy / all", sort: (row) => slotsOf(row).total },
  { title: "Devices", cell: (row) => devicesOf(row).map((/** @type {any} */ each) => each.name).join(", ") || "–" },
  { title: "Engine", cell: (row) => row.status?.runtime || "–", sort: (row) => row.status?.runtime ?? "" },
  { title: "Version", cell: (row) => row.status?.version || "–", sort: (row) => row.status?.version ?? "" },
];

/** The tokens with which runners join. @param {{changes: number}} props */
function Tokens({ changes }) {
  const [found, setFound] = useState(/** @type {{items: any[], error: unknown}} */ ({ items: [], error: null }));
  const [chosen, setChosen] = useState(/** @type {any} */ (null));
  const [revoked, setRevoked] = useState(0);
  useEffect(() => {
    const abort = new AbortController();
    get("/v1/admin/join-tokens", {}, abort.signal).then(
      ({ items }) => setFound({ items, error: null }),
      (error) => abort.signal.aborted || setFound({ items: [], error }),
    );
    return () => abort.abort();
  }, [changes, revoked]);
  if (!found.items.length && !found.error) return null;
  return html`<section class="panel tokens"><h2>Join tokens and machines</h2><${ErrorNote} error=${found.error} />
    ${found.items.length > 0 &&
    html`<${Table} label="Join tokens" rows=${found.items} rowKey=${(/** @type {any} */ row) => row.id} height="20rem" columns=${[
      { title: "Id", cell: (/** @type {any} */ row) => html`<span class="mono">${row.id}</span>` },
      { title: "Type", cell: (/** @type {any} */ row) => row.type },
      { title: "Names", cell: (/** @type {any} */ row) => row.namePattern || row.names.join(" ") || "new ones", className: "wrap" },
      { title: "For", cell: (/** @type {any} */ row) => row.description || "–", className: "wrap" },
      { title: "Made", cell: (/** @type {any} */ row) => ago(row.createTime) },
      { title: "Ends", cell: (/** @type {any} */ row) => clock(row.expireTime) || "never" },
      { title: "Action", cell: (/** @type {any} */ row) => can("runners:edit") && html`<button aria-label=${`Revoke ${row.id}`} onClick=${() => setChosen(row)}>Revoke</button>` },
    ]} />`}
    ${chosen &&
    html`<${Confirm} title=${`Revoke ${chosen.id}`} action="Revoke" isDangerous onClose=${() => setChosen(null)}
      text=${html`<p>Runners that joined with it leave the mesh and cannot come back.</p>
        <${Code} label="Command" text=${command("runner", "token", "revoke", chosen.id)} />`}
      onDo=${async () => {
        await remove(`/v1/admin/join-tokens/${segment(chosen.id)}`);
        setRevoked(revoked + 1);
      }} />`}
  </section>`;
}
