// One runner: its state and health, its models, its devices, what its engines print, and how it is removed.
import { html, useEffect, useState } from "../parts/html.js";
import { get, remove, segment } from "../api.js";
import { address, go } from "../navigation.js";
import { can } from "../session.js";
import { command } from "../parts/commands.js";
import { Confirm } from "../parts/dialog.js";
import { EngineLog } from "../parts/engine_log.js";
import { ago, bytes, clock, words } from "../parts/format.js";
import { Table } from "../parts/table.js";
import { Bar, Code, ErrorNote, Facts, LiveNote, State } from "../parts/widgets.js";
import { heldBytes } from "./models_view.js";
import { devicesOf, slotsOf, stateOf } from "./runners.js";

/** How often the health of the process is asked for. */
const HEALTH_MILLISECONDS = 5000;

/** `log`: the model whose log is shown first. @param {{name: string, runners: import("../live.js").Collection, log: string}} props */
export function RunnerDetail({ name, runners, log }) {
  const runner = runners.items.get(name);
  const [isRemoving, setRemoving] = useState(false);
  const crumb = html`<p class="back"><a href=${address("runners")}>Runners</a></p>`;
  if (!runner) return html`${crumb}<h1>${name}</h1><${LiveNote} live=${runners} />${runners.isComplete && html`<p class="faint">There is no runner with this name.</p>`}`;
  const isActive = runner.status?.state === "active";
  return html`${crumb}
    <div class="row title"><h1>${name}</h1><${State} value=${stateOf(runner)} />
      ${can("runners:edit") && html`<button onClick=${() => setRemoving(true)}>Remove</button>`}</div>
    ${(runner.status?.conditions ?? []).filter((/** @type {any} */ each) => each.status !== "True").map((/** @type {any} */ each) => html`<p key=${each.type} class="problem">${each.message}</p>`)}
    <section class="panel"><h2>Runner</h2><${Facts} facts=${factsOf(runner)} /></section>
    <${Models} instances=${runner.status?.instances ?? []} />
    <${Devices} devices=${devicesOf(runner)} />
    ${isActive && can("telemetry:view") && html`<${Health} name=${name} />`}
    ${isActive && html`<${Logs} instances=${runner.status.instances ?? []} wanted=${log} />`}
    <section class="panel"><h2>CLI</h2>
      <${Code} label="Commands" text=${[command("describe", "runner", name), command("logs", `runner/${name}`, "-f")].join("\n")} /></section>
    ${isRemoving && html`<${RemoveDialog} runner=${runner} onClose=${() => setRemoving(false)} />`}`;
}

/** @param {any} runner @returns {[string, any][]} */
function factsOf({ status = {} }) {
  const slots = slotsOf({ status });
  return [
    ["Host", status.host],
    ["Joined", status.link === "dial-out" ? "through the relay" : "directly"],
    ["Engine", status.runtime],
    ["Version", status.version],
    ["Slots", slots.total && `${slots.used} of ${slots.total} busy`],
    ["Max concurrent requests", status.maxRequests],
    ["Accepts models", status.addsModels && "yes"],
    ["Attached servers", (status.attachedServers ?? []).join(", ")],
    ["Clock", status.clockOffsetSeconds && `${status.clockOffsetSeconds} s off`],
    ["Last heartbeat", ago(status.lastHeartbeatAt)],
    ["Offline since", clock(status.inactiveSince)],
  ];
}

/** @param {{instances: any[]}} props */
function Models({ instances }) {
  return html`<section class="panel"><h2>Models</h2><${Table} label="Models" rows=${instances} rowKey=${(/** @type {any} */ row) => row.model} height="20rem"
    empty="No models." columns=${[
      { title: "Model", cell: (/** @type {any} */ row) => html`<a href=${address(`models/${row.model}`)}>${row.model}</a>`, sort: (/** @type {any} */ row) => row.model },
      { title: "State", cell: (/** @type {any} */ row) => html`<${State} value=${row.phase} title=${row.detail} />`, sort: (/** @type {any} */ row) => row.phase },
      { title: "Slots", cell: (/** @type {any} */ row) => `${row.slotsUsed} / ${row.slotsTotal}`, className: "number", hint: "busy / all" },
      { title: "Memory", cell: (/** @type {any} */ row) => bytes(heldBytes(row)) || "–", className: "number" },
      { title: "Faults", cell: (/** @type {any} */ row) => html`<span title=${row.lastFault}>${row.faultCount ?? 0}</span>`, className: "number" },
    ]} /></section>`;
}

/** @param {{devices: any[]}} props */
function Devices({ devices }) {
  if (!devices.length) return null;
  return html`<section class="panel"><h2>Devices of the host</h2>
    ${devices.map((each) => {
      const total = Number(each.totalBytes ?? 0);
      const booked = Number(each.bookedBytes ?? 0);
      return html`<div key=${each.id ?? each.index}><p class="row"><strong>${each.name}</strong>
        <span class="faint">${bytes(booked)} booked of ${bytes(total)}</span></p>
        <${Bar} label=${each.name} total=${total} parts=${[{ name: "booked", value: booked, tone: "reserved", text: bytes(booked) }]} /></div>`;
    })}</section>`;
}

/** The health of its process. @param {{name: string}} props */
function Health({ name }) {
  const [found, setFound] = useState(/** @type {{health: any, error: unknown}} */ ({ health: null, error: null }));
  const process = `runner/${name}`;
  useEffect(() => {
    const abort = new AbortController();
    const read = () => get("/v1/admin/process-health", { process }, abort.signal).then(
      (health) => setFound({ health, error: null }),
      (error) => abort.signal.aborted || setFound((before) => ({ ...before, error })),
    );
    void read();
    const timer = setInterval(read, HEALTH_MILLISECONDS);
    return () => {
      clearInterval(timer);
      abort.abort();
    };
  }, [process]);
  const { health, error } = found;
  return html`<section class="panel"><div class="row"><h2>Health</h2>${health && html`<${State} value=${health.status} />`}</div><${ErrorNote} error=${error} />
    ${health &&
    html`<${Facts} facts=${health.components.map((/** @type {any} */ each) => [words(each.name), html`<${State} value=${each.state} /> ${each.message ?? ""}`])} />`}
  </section>`;
}

/** What the engines of its models print, first the wanted one. @param {{instances: any[], wanted: string}} props */
function Logs({ instances, wanted }) {
  const [chosen, setChosen] = useState(wanted);
  const names = instances.map((each) => each.model);
  const model = names.includes(chosen) ? chosen : (names[0] ?? "");
  if (!model) return null;
  return html`<section class="panel"><div class="row"><h2>Engine log</h2>
      <label class="inline">Model <select value=${model} onChange=${(/** @type {any} */ event) => setChosen(event.target.value)}>
        ${names.map((name) => html`<option key=${name} value=${name}>${name}</option>`)}</select></label></div>
    <${EngineLog} key=${model} model=${model} /></section>`;
}

/** @param {{runner: any, onClose: () => void}} props */
function RemoveDialog({ runner, onClose }) {
  const isActive = runner.status?.state === "active";
  return html`<${Confirm} title=${`Remove ${runner.name}`} action="Remove" isDangerous onClose=${onClose}
    text=${html`<p>${isActive
        ? "It is online: its requests finish first, and its models are unloaded. It joins again automatically unless it is stopped on its machine."
        : "It is offline. Its models are removed; it can join again."}</p>
      <${Code} label="Command" text=${command("delete", "runner", runner.name, ["--force", isActive])} />`}
    onDo=${async () => {
      await remove(`/api/v1/runners/${segment(runner.name)}`, { query: { force: isActive || undefined } });
      if (!isActive) go("runners");
    }} />`;
}
