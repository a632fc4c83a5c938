// Runners: the list of all of them with how another one joins, and one with its models, devices and logs.
import { html } from "../parts/html.js";
import { collection, useLive } from "../live.js";
import { can } from "../session.js";
import { RunnerDetail } from "./runners_detail.js";
import { RunnerList } from "./runners_list.js";

/** The kinds that are watched, and the right that each needs. */
const KINDS = { runner: "runners:view", memory: "operations:view" };

/** @param {{name: string, query: URLSearchParams}} props */
export function Page({ name, query }) {
  useLive(...Object.entries(KINDS).filter(([, right]) => can(right)).map(([kind]) => kind));
  const runners = collection("runner").value;
  return name ? html`<${RunnerDetail} key=${name} name=${name} runners=${runners} log=${query.get("log") ?? ""} />` : html`<${RunnerList} runners=${runners} />`;
}

/** The state of a runner in one word. @param {any} runner */
export function stateOf({ status = {} }) {
  if (status.state !== "active") return status.state ?? "unknown";
  return status.clockRefused ? "refused" : status.draining ? "draining" : "active";
}

/** How many of a runner's models are ready, and how many it has. @param {any} runner */
export function modelsText({ status = {} }) {
  const instances = status.instances ?? [];
  const ready = instances.filter((/** @type {any} */ each) => each.phase === "ready").length;
  return instances.length ? `${ready} of ${instances.length} ready` : "none";
}

/** Busy slots and all of them. @param {any} runner */
export function slotsOf({ status = {} }) {
  const instances = status.instances ?? [];
  const sum = (/** @type {string} */ field) => instances.reduce((/** @type {number} */ total, /** @type {any} */ each) => total + (each[field] ?? 0), 0);
  return { used: sum("slotsUsed"), total: sum("slotsTotal") };
}

/** The accelerators of a runner's host, as the ledger has them. @param {any} runner */
export function devicesOf({ status = {} }) {
  return collection("memory").value.items.get(status.host)?.devices ?? [];
}
