// The settings of the whole mesh, which routers follow immediately.
import { html, useEffect, useState } from "../parts/html.js";
import { get, put } from "../api.js";
import { comebacks } from "../live.js";
import { can } from "../session.js";
import { command } from "../parts/commands.js";
import { Dialog } from "../parts/dialog.js";
import { notify } from "../parts/notices.js";
import { Code, ErrorNote } from "../parts/widgets.js";
import { Diff } from "./settings_diff.js";

/** @type {[string, string][]} */
const JOURNAL = [
  ["", "not set"],
  ["none", "not journaled"],
  ["wait", "task while the caller waits"],
  ["keep", "as a task that continues without its caller"],
];

export function MeshSettings() {
  const [present, setPresent] = useState(/** @type {any} */ (null));
  const [wanted, setWanted] = useState(/** @type {any} */ (null));
  const [error, setError] = useState(/** @type {unknown} */ (null));
  const [isShown, setShown] = useState(false);
  useEffect(() => {
    get("/api/v1/config").then((found) => { setPresent(found); setWanted((/** @type {any} */ known) => known ?? found); }, setError);
  }, [comebacks.value]);
  if (!wanted) return html`<${ErrorNote} error=${error} />`;
  const mayEdit = can("settings:edit");
  const apply = async () => {
    setError(null);
    try {
      const changed = await put("/api/v1/config", wanted);
      setPresent(changed);
      setWanted(changed);
      notify("settings of the mesh changed");
      setShown(false);
    } catch (failure) {
      setError(failure);
    }
  };
  const settings = [`allowCloudFallback=${wanted.allowCloudFallback}`, ...(wanted.journal ? [`journal=${wanted.journal}`] : [])];
  return html`<form class="panel" onSubmit=${(/** @type {Event} */ event) => { event.preventDefault(); setShown(true); }} novalidate>
      <div class="fields">
        <label class="inline"><input type="checkbox" name="allowCloudFallback" checked=${wanted.allowCloudFallback} disabled=${!mayEdit}
          onChange=${(/** @type {any} */ event) => setWanted({ ...wanted, allowCloudFallback: event.target.checked })} /> Routes may fall back to remote models</label>
        <label>Default durability <select name="journal" value=${wanted.journal ?? ""} disabled=${!mayEdit}
          onChange=${(/** @type {any} */ event) => setWanted({ ...wanted, journal: event.target.value || undefined })}>
          ${JOURNAL.filter(([value]) => value || !present?.journal).map(([value, words]) => html`<option key=${value} value=${value}>${words}</option>`)}</select></label>
      </div>
      ${mayEdit && html`<div class="buttons"><button type="submit" class="main">Show changes</button></div>`}
    </form>
    ${isShown && html`<${Dialog} title="Settings of the mesh" onClose=${() => setShown(false)} isWide>
      <${Diff} label="Changes of the settings" before=${present} after=${wanted} />
      <${Code} label="Command" text=${command("config", "set", ...settings)} />
      <${ErrorNote} error=${error} />
      <div class="buttons"><button onClick=${() => setShown(false)}>Back</button><button class="main" onClick=${apply}>Apply</button></div>
    </${Dialog}>`}`;
}
