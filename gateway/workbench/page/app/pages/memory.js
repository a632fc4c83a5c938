// Memory: each device of each host as bars of what is reserved and in use, who waits for it, and the leases.
import { html, useEffect, useState } from "../parts/html.js";
import { get } from "../api.js";
import { collection, useLive } from "../live.js";
import { can } from "../session.js";
import { ago, bytes, figure, seconds, toNumber, words } from "../parts/format.js";
import { Table } from "../parts/table.js";
import { Bar, Code, LiveNote, State } from "../parts/widgets.js";
import { Leases } from "./memory_leases.js";

export function Page() {
  useLive("memory", ...(can("models:view") ? ["model"] : []));
  const live = collection("memory").value;
  const hosts = [...live.items.values()].sort((left, right) => left.host.localeCompare(right.host, undefined, { numeric: true }));
  return html`<h1>Memory</h1>
    <${LiveNote} live=${live} />
    ${live.isComplete && !hosts.length && html`<${Nothing} />`}
    ${hosts.map((host) => html`<${Host} key=${host.host} host=${host} />`)}
    <${SavedPrompts} />`;
}

/** The prompts that lost their slot, in main memory, and those of ended engines, on disk: as they are when the page opens. */
function SavedPrompts() {
  const [caches, setCaches] = useState(/** @type {any[]} */ ([]));
  useEffect(() => {
    if (!can("operations:view")) return;
    const abort = new AbortController();
    get("/v1/admin/models", {}, abort.signal).then(
      ({ items }) => setCaches(items.flatMap((/** @type {any} */ each) => each.replicas.members).filter((/** @type {any} */ { cache = {} }) => cache.keptLimitBytes || cache.storedPromptCount)),
      () => {},
    );
    return () => abort.abort();
  }, []);
  if (!caches.length) return null;
  return html`<section class="panel" aria-label="Saved prompts"><h2>Saved prompts</h2>
    <${Table} label="Saved prompts" rows=${caches} rowKey=${(/** @type {any} */ row) => `${row.runner}/${row.model}`} columns=${[
      { title: "Model", cell: (/** @type {any} */ row) => row.model },
      { title: "Runner", cell: (/** @type {any} */ row) => row.runner },
      { title: "Main memory", cell: (/** @type {any} */ { cache }) => `${cache.keptPromptCount}: ${bytes(cache.keptBytes)} of ${bytes(cache.keptLimitBytes)}` },
      { title: "Disk", cell: (/** @type {any} */ { cache }) => `${cache.storedPromptCount}: ${bytes(cache.storedBytes)} of ${bytes(cache.storedLimitBytes)}, shared by the runner's models` },
    ]} /></section>`;
}

function Nothing() {
  return html`<section class="panel">
    <p>No runner has reported an accelerator. Models run on processors, and no memory is leased.</p>
    <p class="faint">Add a machine with a GPU with one command; <code>accelerators.declared</code> in weft.yaml declares memory where
      there is no driver.</p>
    <${Code} label="Command" text="weft doctor" />
  </section>`;
}

const SOURCES = { nvml: "reported by the driver", declared: "declared in weft.yaml", unknown: "the driver does not respond: last known sizes" };

/** @param {{host: any}} props */
function Host({ host }) {
  const source = SOURCES[/** @type {keyof typeof SOURCES} */ (host.source)] ?? words(host.source);
  return html`<section class="panel" aria-label=${host.host}>
    <div class="row"><h2>${host.host}</h2><span class="faint">${source}${host.seenAt ? ` · ${ago(host.seenAt)}` : ""}</span></div>
    <div class="devices">${host.devices.map((/** @type {any} */ device) => html`<${Device} key=${device.index} device=${device} leases=${host.leases} />`)}</div>
    <${Waits} host=${host} />
    <${Leases} host=${host} />
  </section>`;
}

/** One device: what leases reserve of it, and what its driver sees in use. @param {{device: any, leases: any[]}} props */
function Device({ device, leases }) {
  const name = device.name || `device ${device.index}`;
  const total = Number(device.totalBytes);
  const margin = toNumber(device.marginBytes) ?? 0;
  const used = toNumber(device.usedBytes);
  const foreign = toNumber(device.foreignBytes);
  const reserved = leases
    .filter((lease) => lease.bytesByDevice?.[device.index])
    .map((lease) => {
      const isHeld = lease.state === "held";
      return part(isHeld ? lease.purpose : `${lease.purpose} (${words(lease.state)})`, Number(lease.bytesByDevice[device.index]), isHeld ? "reserved" : "foreign");
    });
  const seen = used === null ? [] : [part("by leases", Math.max(0, used - (foreign ?? 0)), "seen"), part("without a lease", foreign ?? 0, "foreign")];
  const load = [
    device.utilization === undefined ? "" : `${Math.round(device.utilization * 100)} % busy`,
    device.powerMilliwatts === undefined ? "" : `${figure(device.powerMilliwatts / 1000)} W`,
  ].filter(Boolean);
  return html`<div class="device">
    <div><strong>${device.index}: ${name}</strong></div>
    <div class="faint">${[`${bytes(device.freeBytes)} free of ${bytes(total)}`, ...load].join(" · ")}</div>
    <div class="measures">
      <span class="faint">Reserved</span>
      <${Bar} label=${`${name}, reserved`} total=${total} parts=${[...reserved, part("kept free", margin, "faint")]} />
      <span class="number">${bytes(device.bookedBytes)}</span>
      <span class="faint">In use</span>
      ${used === null ? html`<span class="faint">unknown</span>` : html`<${Bar} label=${`${name}, in use`} total=${total} parts=${seen} />`}
      <span class="number">${used === null ? "" : bytes(used)}</span>
    </div>
    ${Boolean(foreign) && html`<p class="foreign-note">Processes without a lease use ${bytes(foreign)}.</p>`}
  </div>`;
}

/** @param {string} name @param {number} value @param {string} tone */
const part = (name, value, tone) => ({ name, value, tone, text: bytes(value) });

/** Who waits for memory of a host, first in line first. @param {{host: any}} props */
function Waits({ host }) {
  const waits = host.waits ?? [];
  if (!host.waitingCount) return null;
  const more = host.waitingCount - waits.length;
  return html`<h3>Waiting for memory (${host.waitingCount})</h3>
    <ol class="waiting" aria-label=${`Waiting for memory of ${host.host}`}>${waits.map(
      (/** @type {any} */ wait, /** @type {number} */ at) => html`<li key=${at}>
        <div class="row"><strong>${wait.purpose}</strong><${State} value="waiting" />
          <span class="faint">${[`${bytes(wait.bytes)} for ${wait.holder}`, where(wait), `${words(wait.priority)} priority`, left(wait)].filter(Boolean).join(" · ")}</span></div>
        ${wait.detail && html`<p class="faint">${wait.detail}</p>`}</li>`,
    )}</ol>
    ${more > 0 && html`<p class="faint">and ${more} more</p>`}`;
}

/** @param {any} wait */
const where = (wait) => (wait.deviceIndexes?.length ? `on device ${wait.deviceIndexes.join(", ")}` : "");
/** @param {any} wait */
const left = (wait) => (wait.remainingWaitSeconds === undefined ? "" : `times out in ${seconds(wait.remainingWaitSeconds)}`);
