// What is asked before something is done with a model: unload, flush, remove, detach.
import { html, useState } from "../parts/html.js";
import { post, segment } from "../api.js";
import { command } from "../parts/commands.js";
import { Confirm, Dialog } from "../parts/dialog.js";
import { follow } from "../parts/operations.js";
import { Code, ErrorNote } from "../parts/widgets.js";

/** Loads a model as it is configured, which wakes one that hibernates. @param {string} name */
export const wake = async (name) => follow(await post(`/v1/admin/models/${segment(name)}/load`));

/** @param {{model: any, onClose: () => void}} props */
export function UnloadDialog({ model, onClose }) {
  const busy = model.status?.instance?.slotsUsed ?? 0;
  return html`<${Confirm} title=${`Unload ${model.name}`} action="Unload" isDangerous onClose=${onClose}
    text=${html`<p>${busy ? `${busy} running ${busy === 1 ? "request" : "requests"} will finish first, up to the drain time of its runner. ` : ""}The
        engine ends and its memory is free. The next request loads the model again.</p>
      <${Code} label="Command" text=${command("unload", model.name)} />`}
    onDo=${async () => follow(await post(`/v1/admin/models/${segment(model.name)}/unload`))} />`;
}

/** @param {{model: any, onClose: () => void}} props */
export function RemoveDialog({ model, onClose }) {
  return html`<${Confirm} title=${`Remove ${model.name}`} action="Remove" isDangerous onClose=${onClose}
    text=${html`<p>It was added by its source, <span class="mono">${model.status?.instance?.addedSource}</span>. Its requests end first; then it is not served
        any more. Its files stay in the store.</p>
      <${Code} label="Command" text=${command("delete", "model", model.name, ["--force", true])} />`}
    onDo=${async () => follow(await post(`/v1/admin/models/${segment(model.name)}/remove`))} />`;
}

/** @param {{name: string, onClose: () => void}} props */
export function DetachDialog({ name, onClose }) {
  return html`<${Confirm} title=${`Detach ${name}`} action="Detach" isDangerous onClose=${onClose}
    text=${html`<p>The models of the server are removed after their running requests. The server keeps running.</p>
      <${Code} label="Command" text=${command("models", "detach", name)} />`}
    onDo=${async () => follow(await post(`/v1/admin/servers/${segment(name)}/detach`))} />`;
}

/** Which cached prefixes of a model are dropped. @param {{model: any, onClose: () => void}} props */
export function FlushDialog({ model, onClose }) {
  const [tenant, setTenant] = useState("");
  const [tag, setTag] = useState("");
  const [error, setError] = useState(/** @type {unknown} */ (null));
  const scope = tag ? "tag" : tenant ? "tenant" : "model";
  /** @param {Event} event */
  const submit = async (event) => {
    event.preventDefault();
    try {
      follow(await post("/v1/admin/cache/flush", { scope, model: model.name, tenant, tag }));
      onClose();
    } catch (failure) {
      setError(failure);
    }
  };
  return html`<${Dialog} title=${`Flush the cache of ${model.name}`} onClose=${onClose}>
    <form onSubmit=${submit}>
      <p>Cached prefixes are dropped, and the next requests process their whole prompt. Running requests keep theirs.</p>
      <div class="fields">
        <label>Tenant <input value=${tenant} placeholder="every tenant" onInput=${(/** @type {any} */ event) => setTenant(event.target.value)} /></label>
        <label>Cache tag <input value=${tag} placeholder="every tag" onInput=${(/** @type {any} */ event) => setTag(event.target.value)} /></label>
      </div>
      <${Code} label="Command" text=${command("models", "flush", ["--model", model.name], ["--tenant", tenant], ["--tag", tag])} />
      <${ErrorNote} error=${error} />
      <div class="buttons"><button type="button" onClick=${onClose}>Cancel</button><button type="submit" class="main danger">Flush</button></div>
    </form>
  </${Dialog}>`;
}
