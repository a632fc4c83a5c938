// One model: its state and why, its operations, its declaration, what it takes, its replicas, its events, and what can be done.
import { html, useEffect, useState } from "../parts/html.js";
import { get, segment } from "../api.js";
import { collection } from "../live.js";
import { address } from "../navigation.js";
import { pageOf } from "../page_table.js";
import { can } from "../session.js";
import { command } from "../parts/commands.js";
import { bytes, clock, count, seconds, words } from "../parts/format.js";
import { attempt } from "../parts/notices.js";
import { hasEnded, OperationNote, allOperations } from "../parts/operations.js";
import { Table } from "../parts/table.js";
import { Code, ErrorNote, Facts, LiveNote } from "../parts/widgets.js";
import { FlushDialog, RemoveDialog, UnloadDialog, wake } from "./models_actions.js";
import { LoadDialog, rangeText } from "./models_load.js";
import { ChatLink, contextOf, isAsleep, memoryOf, ModelState, poolOf, queueOf, takes } from "./models_view.js";
import { WhyNot } from "./models_why.js";

/** Between two reads of what the live documents do not have. */
const REFRESH_MILLISECONDS = 500;
const SHOWN_OPERATIONS = 5;
const MAX_EVENTS = 100;
/** @type {Record<string, string>} */
const ISOLATION = { slots: "per slot", whole: "whole cache", salt: "per salt" };

/** @param {{name: string, models: import("../live.js").Collection}} props */
export function ModelDetail({ name, models }) {
  const model = models.items.get(name);
  const own = operationsOf(name, model, allOperations());
  const { admin, error } = useAdmin(name, model, own.filter(hasEnded).length);
  const [dialog, setDialog] = useState("");
  const crumb = html`<p class="back"><a href=${address("models")}>Models</a></p>`;
  if (!model) {
    const members = [...models.items.values()].filter((each) => poolOf(each) === name);
    return html`${crumb}<h1>${name}</h1><${LiveNote} live=${models} />
      ${models.isComplete && (members.length ? html`<p>A pool of ${members.length}:</p><${Members} members=${members} />` : html`<p class="faint">There is no model with this name.</p>`)}`;
  }
  const close = () => setDialog("");
  const pool = poolOf(model);
  const members = pool ? [...models.items.values()].filter((each) => poolOf(each) === pool) : [];
  return html`${crumb}
    <div class="row title"><h1>${name}</h1><${ModelState} model=${model} /></div>
    <${Actions} model=${model} open=${setDialog} />
    <${ErrorNote} error=${error} />
    ${own.length > 0 &&
    html`<section class="panel operations" aria-label="Operations"><h2>Operations</h2>${own.slice(0, SHOWN_OPERATIONS).map(
      (each) => html`<${OperationNote} key=${each.name} operation=${each} />`,
    )}</section>`}
    <${WhyNot} model=${model} admin=${admin} operations=${own} />
    <section class="panel"><h2>Definition</h2><${Facts} facts=${factsOf(model, admin)} /></section>
    <section class="panel"><h2>Capabilities</h2><${Facts} facts=${capabilitiesOf(model, admin)} /></section>
    ${members.length > 1 && html`<section class="panel"><h2>Replicas in ${pool}</h2><${Members} members=${members} /></section>`}
    <${Constraints} admin=${admin} />
    ${can("telemetry:view") && html`<${Events} name=${name} />`}
    <section class="panel"><h2>CLI</h2>
      <${Code} label="Commands" text=${[command("describe", "model", name), command("logs", name, "-f"), command("events", "model", name)].join("\n")} /></section>
    ${dialog === "load" && html`<${LoadDialog} model=${model} admin=${admin} onClose=${close} />`}
    ${dialog === "unload" && html`<${UnloadDialog} model=${model} onClose=${close} />`}
    ${dialog === "flush" && html`<${FlushDialog} model=${model} onClose=${close} />`}
    ${dialog === "remove" && html`<${RemoveDialog} model=${model} onClose=${close} />`}`;
}

/** Load, unload and the rest, as far as they make sense now and the key may. @param {{model: any, open: (dialog: string) => void}} props */
function Actions({ model, open }) {
  const asleep = isAsleep(model);
  const name = model.name;
  if (!can("operations:create") || !model.status?.runner) return html`<${ChatLink} model=${model} />`;
  return html`<div class="row tools">
    <${ChatLink} model=${model} />
    ${asleep && html`<button class="main" title=${command("load", name)} onClick=${() => attempt(() => wake(name))}>${model.status?.state === "hibernating" ? "Wake" : "Load"}</button>`}
    <button onClick=${() => open("load")}>Load options</button>
    <button disabled=${asleep} onClick=${() => open("unload")}>Unload</button>
    <button onClick=${() => open("flush")}>Flush cache</button>
    ${model.status?.instance?.addedSource && html`<button onClick=${() => open("remove")}>Remove</button>`}
  </div>`;
}

/** The administrative view of a model, read again after changes of the model and ends of its operations.
 * @param {string} name @param {any} model @param {number} endedCount */
function useAdmin(name, model, endedCount) {
  const [found, setFound] = useState(/** @type {{admin: any, error: unknown}} */ ({ admin: null, error: null }));
  const isKnown = Boolean(model);
  useEffect(() => {
    if (!isKnown || !can("operations:view")) return;
    const abort = new AbortController();
    const read = () =>
      get(`/v1/admin/models/${segment(name)}`, {}, abort.signal).then(
        (admin) => setFound({ admin, error: null }),
        (error) => abort.signal.aborted || setFound((before) => ({ ...before, error })),
      );
    const timer = setTimeout(read, found.admin ? REFRESH_MILLISECONDS : 0);
    return () => {
      clearTimeout(timer);
      abort.abort();
    };
  }, [name, isKnown, model, endedCount]);
  return found;
}

/** The operations about a model or its pool. @param {string} name @param {any} model @param {any[]} all */
function operationsOf(name, model, all) {
  const names = new Set([name, model && poolOf(model)].filter(Boolean));
  return all.filter(({ action, result }) => names.has(action.model) || result?.added?.name === name);
}

/** @param {any} model @param {any} admin */
const replicaOf = (model, admin) => admin?.replicas?.members?.find((/** @type {any} */ each) => each.model === model.name);

/** @param {any} model @param {any} admin @returns {[string, any][]} */
function factsOf(model, admin) {
  const { runner, type, kind, createdAt, lastHeartbeatAt, instance = {} } = model.status ?? {};
  const memory = memoryOf(model);
  const replica = replicaOf(model, admin);
  const file = instance.modelFile ?? {};
  const queue = queueOf(model);
  return [
    ["Pool", poolOf(model)],
    ["Runner", runner && linked("runners", runner)],
    ["Host", replica?.host],
    ["Engine", type],
    ["Slots", instance.slotsTotal ? `${instance.slotsUsed} of ${instance.slotsTotal} busy` : ""],
    ["Queue", queue && `${queue.waiting} waiting, limit ${queue.maxWaiting}`],
    ["Context", contextText(contextOf(model))],
    ["Memory", memory.bytes && (memory.isHeld ? bytes(memory.bytes) : `about ${bytes(memory.bytes)} to load (${words(instance.memory?.estimateSource)})`)],
    ["Unloaded when idle at", clock(instance.unloadAt)],
    ["Unloaded when idle for", instance.keepAliveSeconds === undefined ? "" : seconds(instance.keepAliveSeconds)],
    ["Pinned", instance.pinned && "yes: never evicted"],
    ["Adapter of", instance.baseModel],
    ["Faults", instance.faultCount || ""],
    ["Source", kind === "public" ? "declared" : "runner"],
    ["Since", clock(createdAt)],
    ["Last heartbeat", clock(lastHeartbeatAt)],
    ["Remote", model.remote ? "yes" : "no"],
    ["Source", instance.addedSource],
    ["Upstream", model.upstream],
    ["File", [file.architecture, file.parameterCount && `${count(file.parameterCount)} parameters`, file.quantization, file.sizeBytes && bytes(file.sizeBytes)].filter(Boolean).join(", ")],
    ["Path", admin?.definition?.modelPaths?.join(", ")],
    ["Digest", model.digest && html`<span class="mono">${model.digest}</span>`],
    ["Tier", model.tier],
    ["Owner", model.owner],
    ["Labels", Object.entries(model.labels ?? {}).map(([key, value]) => `${key}=${value}`).join(", ")],
    ["Wake", model.wake && (model.wake.byMesh ? `by the mesh (${words(model.wake.byMesh.type)})` : "automatic")],
  ];
}

/** A name, as a link where its page is there for this key. @param {string} path @param {string} name */
function linked(path, name) {
  const entry = pageOf(path)?.entry;
  return entry && can(entry.needs) ? html`<a href=${address(`${path}/${name}`)}>${name}</a>` : name;
}

/** @param {number} tokens */
const contextText = (tokens) => (tokens ? `${tokens.toLocaleString("en")} tokens` : "");

/** @param {any} model @param {any} admin @returns {[string, any][]} */
function capabilitiesOf(model, admin) {
  const known = admin?.capabilities ?? {};
  const modes = (known.thinkingModes ?? []).join(", ");
  const cache = replicaOf(model, admin)?.cache ?? {};
  return [
    ["Requests", (model.operations ?? []).map(words).join(", ")],
    ["Input", takes(model).filter((each) => !["tools", "thinking"].includes(each)).join(", ") || (known.modalities ?? []).join(", ") || "Unknown"],
    ["Tools", known.tools === undefined ? "Unknown (will be tried)" : known.tools ? "yes" : "no"],
    ["Thinking", modes || "Unknown (will be tried)"],
    ["Streams", known.streaming === undefined ? "" : known.streaming ? "yes" : "no"],
    ["Tenant isolation", known.cacheIsolation?.length ? known.cacheIsolation.map((/** @type {string} */ each) => ISOLATION[each] ?? each).join(", ") : ""],
    ["Restored prompts", cache.continuesRestored === undefined ? cache.notRestoredReason && `Unknown: ${cache.notRestoredReason}` : cache.continuesRestored ? "continued" : `none: ${cache.notRestoredReason}`],
    ["Translates from", known.sourceLanguages?.join(", ")],
    ["Translates into", known.targetLanguages?.join(", ")],
  ];
}

/** @param {{members: any[]}} props */
function Members({ members }) {
  return html`<${Table} label="Replicas" rows=${members} rowKey=${(/** @type {any} */ row) => row.name} columns=${[
    { title: "Model", cell: (/** @type {any} */ row) => html`<a href=${address(`models/${row.name}`)}>${row.name}</a>` },
    { title: "State", cell: (/** @type {any} */ row) => html`<${ModelState} model=${row} />` },
    { title: "Runner", cell: (/** @type {any} */ row) => row.status?.runner || "–" },
    { title: "Slots", cell: (/** @type {any} */ row) => `${row.status?.instance?.slotsUsed ?? 0} / ${row.status?.instance?.slotsTotal ?? 0}`, className: "number" },
  ]} />`;
}

/** The settings of a load and their ranges. @param {{admin: any}} props */
function Constraints({ admin }) {
  const { parameters = [], quantizations = [] } = admin?.constraints ?? {};
  if (!parameters.length) return null;
  return html`<details class="panel"><summary><h2>Load options (${parameters.length})</h2></summary>
    ${quantizations.length > 0 && html`<p>Quantizations: ${quantizations.join(", ")}</p>`}
    <${Table} label="Load options" rows=${parameters} rowKey=${(/** @type {any} */ row) => row.name} columns=${[
      { title: "Option", cell: (/** @type {any} */ row) => html`<span class="mono">${row.name}</span>` },
      { title: "Now", cell: (/** @type {any} */ row) => (row.default === undefined ? html`<span class="faint">engine default</span>` : String(row.default)) },
      { title: "Range", cell: rangeText, className: "wrap" },
      { title: "Description", cell: (/** @type {any} */ row) => row.description, className: "wrap" },
    ]} /></details>`;
}

/** What happened to the model lately: older events by a read, newer ones live. @param {{name: string}} props */
function Events({ name }) {
  const [older, setOlder] = useState(/** @type {any[]} */ ([]));
  useEffect(() => {
    const abort = new AbortController();
    get("/api/v1/events", { kind: "model", name, limit: MAX_EVENTS }, abort.signal).then((answer) => setOlder(answer.items), () => {});
    return () => abort.abort();
  }, [name]);
  const live = [...collection("event").value.items.values()].filter((each) => each.resourceKind === "model" && each.resourceName === name);
  const known = new Map([...older, ...live].map((each) => [each.sequence, each]));
  const rows = [...known.values()].sort((left, right) => Number(right.sequence) - Number(left.sequence)).slice(0, MAX_EVENTS);
  return html`<section class="panel"><h2>Events</h2><${Table} label="Events" rows=${rows} rowKey=${(/** @type {any} */ row) => String(row.sequence)}
    empty="No events." height="20rem" columns=${[
      { title: "Time", cell: (/** @type {any} */ row) => clock(row.time) },
      { title: "What", cell: (/** @type {any} */ row) => words(row.reason) },
      { title: "Message", cell: (/** @type {any} */ row) => row.message, className: "wrap" },
    ]} /></section>`;
}
