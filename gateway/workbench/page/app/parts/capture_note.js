// Says on every page that prompts and answers are captured, and of whom.
import { html } from "./html.js";
import { collection, useLive } from "../live.js";
import { address } from "../navigation.js";
import { caller, can } from "../session.js";

/** Tenants with capture: all of them for who may see tenants, otherwise the caller's. */
function capturedTenants() {
  if (!can("settings:view")) return caller.value?.captured ? [caller.value.tenant] : [];
  return [...collection("tenant").value.items.values()].filter((tenant) => tenant.capture).map((tenant) => tenant.name);
}

export function CaptureNote() {
  const isOperator = can("settings:view");
  useLive(...(isOperator ? ["tenant"] : []));
  const names = capturedTenants().sort();
  if (!names.length) return null;
  return html`<p class="panel" role="note">Capture is on: the mesh stores prompts and answers of ${names.length === 1 ? "tenant" : "tenants"} ${names.map(
      (name, at) => html`${at > 0 && ", "}${isOperator ? html`<a href=${address(`settings/tenants/${name}`)}>${name}</a>` : name}`)}.</p>`;
}
