// Why a model is not loaded: what its runner says, the last load that failed, and the memory that it lacks and who holds it.
import { html } from "../parts/html.js";
import { collection } from "../live.js";
import { bytes, clock, toNumber, words } from "../parts/format.js";
import { hasEnded } from "../parts/operations.js";
import { Bar } from "../parts/widgets.js";
import { can } from "../session.js";
import { isReady } from "./models_view.js";

/** The reasons in the words of the mesh, each once: of its engine, its conditions, its last fault. @param {any} model */
function reasonsOf(model) {
  const { conditions = [], instance = {} } = model.status ?? {};
  const failing = conditions.filter((/** @type {any} */ each) => each.status !== "True").map((/** @type {any} */ each) => each.message);
  const fault = instance.lastFault ? `the last fault of its engine: ${instance.lastFault}` : "";
  const reasons = [...new Set([instance.detail, ...failing, fault].filter(Boolean))];
  return reasons.filter((reason) => !reasons.some((other) => other !== reason && other.includes(reason)));
}

/** @param {{model: any, admin: any, operations: any[]}} props */
export function WhyNot({ model, admin, operations }) {
  if (isReady(model)) return null;
  const failed = operations.find((each) => each.action.type === "load" && hasEnded(each));
  const reasons = reasonsOf(model);
  const isNews = failed?.state === "failed" && !reasons.some((reason) => reason.includes(failed.detail || " "));
  const host = admin?.replicas?.members?.find((/** @type {any} */ each) => each.model === model.name)?.host;
  return html`<section class="panel" aria-label="Why it is not loaded">
    <h2>Why it is not loaded</h2>
    <ul class="reasons">${reasons.map((reason) => html`<li key=${reason}>${reason}</li>`)}
      ${isNews && html`<li>the last load failed at ${clock(failed.endedAt)}: <span class="problem">${failed.detail || words(failed.reason)}</span></li>`}
    </ul>
    ${host && can("operations:view") && html`<${Shortage} model=${model} host=${host} />`}
  </section>`;
}

/** The memory of the host: what the model needs of it, and who holds it. @param {{model: any, host: string}} props */
function Shortage({ model, host }) {
  const memory = collection("memory").value.items.get(host);
  if (!memory?.devices?.length) return null;
  const needed = toNumber(model.status?.instance?.memory?.estimatedBytes) || 0;
  const free = memory.devices.reduce((/** @type {number} */ sum, /** @type {any} */ device) => sum + (toNumber(device.freeBytes) ?? 0), 0);
  const lacking = needed - free;
  return html`<h3>Memory of ${host}</h3>
    ${needed > 0 &&
    html`<p>It needs ${bytes(needed)}; ${bytes(free)} ${memory.devices.length > 1 ? `of ${memory.devices.length} devices are` : "are"} free${lacking > 0
        ? html`: <strong>${bytes(lacking)} are missing</strong>` : ""}.${lacking > 0 ? " Idle models that are not pinned yield to a load." : ""}${memory.waitingCount ? ` Waiting for memory there: ${memory.waitingCount}.` : ""}</p>`}
    ${(lacking > 0 || memory.waitingCount > 0) && memory.devices.map((/** @type {any} */ device) => html`<${Device} key=${device.index} device=${device} leases=${memory.leases} />`)}`;
}

/** One device: a bar, and who holds how much of it. @param {{device: any, leases: any[]}} props */
function Device({ device, leases }) {
  const holders = leases.filter((lease) => lease.bytesByDevice?.[device.index]);
  const foreign = toNumber(device.foreignBytes) ?? 0;
  const parts = [
    ...holders.map((lease) => ({ name: lease.purpose, value: Number(lease.bytesByDevice[device.index]), tone: "reserved" })),
    { name: "processes without a lease", value: foreign, tone: "foreign" },
  ];
  return html`<div class="device">
    <div class="row"><span class="grow">${device.name || `device ${device.index}`}</span><span class="faint">${bytes(device.freeBytes)} free of ${bytes(device.totalBytes)}</span></div>
    <${Bar} label=${device.name || `device ${device.index}`} total=${Number(device.totalBytes)} parts=${parts.map((part) => ({ ...part, text: bytes(part.value) }))} />
    <ul class="holders">${holders.map(
      (lease) => html`<li key=${lease.leaseId}><strong>${lease.purpose}</strong> on ${lease.holder} holds ${bytes(lease.bytesByDevice[device.index])}<span class="faint"
        >${lease.pinned ? ", pinned" : ""}${lease.activeRequests ? `, ${lease.activeRequests} running` : ", idle"}${lease.state === "held" ? "" : `, ${words(lease.state)}`}</span></li>`,
    )}${foreign > 0 && html`<li>processes without a lease hold ${bytes(foreign)}</li>`}</ul>
  </div>`;
}
