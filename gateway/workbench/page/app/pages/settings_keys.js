// API keys: listed without their secrets, created and rotated with the secret shown once, revoked.
import { html, useEffect, useState } from "../parts/html.js";
import { get, post, remove, segment } from "../api.js";
import { comebacks } from "../live.js";
import { caller, can } from "../session.js";
import { command } from "../parts/commands.js";
import { Confirm, Dialog } from "../parts/dialog.js";
import { clock } from "../parts/format.js";
import { notify } from "../parts/notices.js";
import { Table } from "../parts/table.js";
import { Code, ErrorNote, State } from "../parts/widgets.js";

/** Named sets of scopes, as `weft keys create --role` has them. @type {Record<string, string[]>} */
const ROLES = {
  user: ["inference:create", "inference:edit", "models:view"],
  viewer: ["*:view"],
  operator: ["inference:*", "remote:*", "models:*", "runners:*", "operations:*", "settings:*", "telemetry:*"],
  admin: ["*:*"],
};

export function KeyList() {
  const [keys, setKeys] = useState(/** @type {any[] | null} */ (null));
  const [error, setError] = useState(/** @type {unknown} */ (null));
  const [isCreating, setCreating] = useState(false);
  const [chosen, setChosen] = useState(/** @type {{key: any, action: "rotate" | "revoke"} | null} */ (null));
  const load = () => get("/api/v1/keys").then((found) => { setKeys(found.items); setError(null); }, setError);
  useEffect(() => void load(), [comebacks.value]);
  // Without a key everyone on this machine would be who makes and revokes them.
  const isRequired = caller.value?.keysRequired ?? true;
  const columns = [
    { title: "Id", cell: (/** @type {any} */ key) => html`<span class="mono">${key.id}</span>`, sort: (/** @type {any} */ key) => key.id },
    { title: "Tenant", cell: (/** @type {any} */ key) => key.tenant, sort: (/** @type {any} */ key) => key.tenant },
    { title: "Description", cell: (/** @type {any} */ key) => key.description, className: "wrap" },
    { title: "Scopes", cell: (/** @type {any} */ key) => key.scopes.join(", "), className: "wrap" },
    { title: "State", cell: (/** @type {any} */ key) => html`<${State} value=${key.state} />`, sort: (/** @type {any} */ key) => key.state },
    { title: "Created", cell: (/** @type {any} */ key) => clock(key.createTime), sort: (/** @type {any} */ key) => key.createTime },
    { title: "Expires", cell: (/** @type {any} */ key) => clock(key.expireTime) || "never" },
    { title: "Actions", cell: (/** @type {any} */ key) => isRequired && can("keys:edit") && !key.revokeTime && html`<span class="row">
        ${can("keys:create") && html`<button onClick=${() => setChosen({ key, action: "rotate" })}>Rotate<span class="unseen"> ${key.id}</span></button>`}
        <button onClick=${() => setChosen({ key, action: "revoke" })}>Revoke<span class="unseen"> ${key.id}</span></button></span>` },
  ];
  return html`<div class="row tools"><span class="faint grow">Keys authenticate callers, and each has a tenant. Tenants need not be declared.</span>
      ${isRequired && can("keys:create") && html`<button class="main" onClick=${() => setCreating(true)}>New key</button>`}</div>
    ${!isRequired && html`<section class="panel"><p>Keys are optional at this address, which only this machine reaches: calls without a key are accepted, also once there are keys.
        Require them in weft.yaml, then restart the mesh. Until then keys are created, rotated and revoked on the command line.</p>
      <${Code} label="weft.yaml" text=${"auth:\n  required: true"} /><${Code} label="Command" text=${command("keys", "create", ["--role", "admin"])} /></section>`}
    <${ErrorNote} error=${error} />
    ${keys && html`<${Table} label="Keys" rows=${keys} rowKey=${(/** @type {any} */ key) => key.id} columns=${columns} empty="There are no keys." />`}
    ${isCreating && html`<${NewKeyDialog} onClose=${() => { setCreating(false); void load(); }} />`}
    ${chosen?.action === "rotate" && html`<${RotateDialog} id=${chosen.key.id} onClose=${() => { setChosen(null); void load(); }} />`}
    ${chosen?.action === "revoke" && html`<${Confirm} title=${`Revoke ${chosen.key.id}`} action="Revoke" isDangerous onClose=${() => setChosen(null)}
      text=${html`<p>It is refused immediately and everywhere. This cannot be undone.</p><${Code} label="Command" text=${command("keys", "revoke", chosen.key.id)} />`}
      onDo=${async () => {
        await remove(`/api/v1/keys/${segment(chosen.key.id)}`);
        notify(`key ${chosen.key.id} revoked`);
        void load();
      }} />`}`;
}

/** The secret of a key, which is never shown again. @param {{made: any, onClose: () => void}} props */
function Secret({ made, onClose }) {
  return html`<p role="status">This is the only time that the key is shown. Copy it now.</p>
    <${Code} label="Key" text=${made.key} />
    ${made.oldExpireTime && html`<p class="faint">The old secret is valid until ${clock(made.oldExpireTime)}.</p>`}
    <div class="buttons"><button class="main" onClick=${onClose}>Done</button></div>`;
}

/** @param {{onClose: () => void}} props */
function NewKeyDialog({ onClose }) {
  const [fields, setFields] = useState({ tenant: "", description: "", scopes: ROLES.user.join("\n"), days: "", maxPriority: "" });
  const [made, setMade] = useState(/** @type {any} */ (null));
  const [error, setError] = useState(/** @type {unknown} */ (null));
  const scopes = fields.scopes.split("\n").map((scope) => scope.trim()).filter(Boolean);
  /** @param {Partial<typeof fields>} changed */
  const change = (changed) => setFields({ ...fields, ...changed });
  /** @param {Event} event */
  const submit = async (event) => {
    event.preventDefault();
    setError(null);
    const lifetimeSeconds = fields.days === "" ? undefined : Math.round(Number(fields.days) * 86_400);
    try {
      setMade(await post("/api/v1/keys", { tenant: fields.tenant, description: fields.description, scopes, lifetimeSeconds, maxPriority: fields.maxPriority || undefined }));
    } catch (failure) {
      setError(failure);
    }
  };
  const role = Object.keys(ROLES).find((name) => ROLES[name].join() === scopes.join()) ?? "";
  if (made) return html`<${Dialog} title="New key" onClose=${onClose} isWide><${Secret} made=${made} onClose=${onClose} /></${Dialog}>`;
  return html`<${Dialog} title="New key" onClose=${onClose} isWide>
    <form onSubmit=${submit} novalidate>
      <div class="fields">
        <label>Tenant <input name="tenant" value=${fields.tenant} placeholder="default" autocomplete="off" spellcheck=${false} onInput=${(/** @type {any} */ event) => change({ tenant: event.target.value.trim() })} /></label>
        <label>Description <input name="description" value=${fields.description} autocomplete="off" onInput=${(/** @type {any} */ event) => change({ description: event.target.value })} /></label>
        <label>Expires in (days) <input name="days" value=${fields.days} placeholder="no limit" inputmode="decimal" autocomplete="off" onInput=${(/** @type {any} */ event) => change({ days: event.target.value.trim() })} /></label>
        <label>Highest priority <select name="maxPriority" value=${fields.maxPriority} onChange=${(/** @type {any} */ event) => change({ maxPriority: event.target.value })}>
          <option value="">as of this key</option>${["high", "normal", "low"].map((name) => html`<option key=${name} value=${name}>${name}</option>`)}</select></label>
        <label>Role <select name="role" value=${role} onChange=${(/** @type {any} */ event) => event.target.value && change({ scopes: ROLES[event.target.value].join("\n") })}>
          <option value="">other scopes</option>${Object.keys(ROLES).map((name) => html`<option key=${name} value=${name}>${name}</option>`)}</select></label>
        <label class="whole">Scopes, one per line <textarea class="mono short" name="scopes" rows="5" spellcheck=${false} value=${fields.scopes} onInput=${(/** @type {any} */ event) => change({ scopes: event.target.value })}></textarea></label>
      </div>
      <${Code} label="Command" text=${command("keys", "create", ["--tenant", fields.tenant], ["--description", fields.description], ["--expires", fields.days && `${fields.days}d`], ["--max-priority", fields.maxPriority],
        ...scopes.map((scope) => /** @type {[string, string]} */ (["--scope", scope])))} />
      <${ErrorNote} error=${error} />
      <div class="buttons"><button type="button" onClick=${onClose}>Cancel</button><button type="submit" class="main">Create</button></div>
    </form>
  </${Dialog}>`;
}

/** @param {{id: string, onClose: () => void}} props */
function RotateDialog({ id, onClose }) {
  const [made, setMade] = useState(/** @type {any} */ (null));
  const [error, setError] = useState(/** @type {unknown} */ (null));
  const act = () => post(`/api/v1/keys/${segment(id)}/rotate`).then(setMade, setError);
  return html`<${Dialog} title=${`Rotate ${id}`} onClose=${onClose} isWide>
    ${made
      ? html`<${Secret} made=${made} onClose=${onClose} />`
      : html`<p>It gets a new secret. The old one stays valid for a grace period.</p>
          <${Code} label="Command" text=${command("keys", "rotate", id)} />
          <${ErrorNote} error=${error} />
          <div class="buttons"><button onClick=${onClose}>Cancel</button><button class="main" onClick=${act}>Rotate</button></div>`}
  </${Dialog}>`;
}
