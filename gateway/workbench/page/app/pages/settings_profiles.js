// Profiles: which is active and what is not as it says; saved from what is, and switched to after the difference was shown.
import { html, useEffect, useState } from "../parts/html.js";
import { get, post, segment } from "../api.js";
import { collection, useLive } from "../live.js";
import { address, go } from "../navigation.js";
import { can } from "../session.js";
import { command } from "../parts/commands.js";
import { Dialog } from "../parts/dialog.js";
import { clock } from "../parts/format.js";
import { notify } from "../parts/notices.js";
import { allOperations, dismiss, follow, isBegunHere, OperationNote } from "../parts/operations.js";
import { Table } from "../parts/table.js";
import { Code, ErrorNote, LiveNote, State } from "../parts/widgets.js";
import { Results } from "./settings_diff.js";
import { PlanDialog } from "./settings_editor.js";
import { editorOf } from "./settings_list.js";
import { KINDS } from "./settings_kinds.js";

/** How long changes of the mesh gather before the active profile is compared with it again. */
const COMPARE_MILLISECONDS = 300;
const KIND = /** @type {import("./settings_kinds.js").Kind} */ (KINDS.find((each) => each.kind === "profile"));

export function ProfileList() {
  useLive("operation");
  const live = collection("profile").value;
  const rows = [...live.items.values()].sort((left, right) => left.name.localeCompare(right.name));
  const changes = useChanges(rows.find((row) => row.status?.active));
  const [isSaving, setSaving] = useState(false);
  const [plan, setPlan] = useState(/** @type {any} */ (null));
  const [error, setError] = useState(/** @type {unknown} */ (null));
  /** @param {string} name */
  const rehearse = async (name) => {
    setError(null);
    try {
      setPlan(await post(`/api/v1/profiles/${segment(name)}/switch`, undefined, { query: { dryRun: true } }));
    } catch (failure) {
      setError(failure);
    }
  };
  const columns = [
    { title: "Name", cell: (/** @type {any} */ row) => html`<a href=${address(editorOf(KIND, row.name).path, editorOf(KIND, row.name).query)}>${row.name}</a>`, sort: (/** @type {any} */ row) => row.name },
    { title: "Status", cell: (/** @type {any} */ row) => (row.status?.active ? html`<${State} value=${changes.length ? "changed" : "active"} title=${changes.join("\n")} />` : "") },
    { title: "Loads", cell: (/** @type {any} */ row) => (row.load ?? []).map((/** @type {any} */ load) => load.model).join(", "), className: "wrap" },
    { title: "Documents", cell: documentsOf, className: "number" },
    { title: "Active since", cell: (/** @type {any} */ row) => clock(row.status?.activeSince) },
    { title: "Description", cell: (/** @type {any} */ row) => row.description, className: "wrap" },
    { title: "Actions", cell: (/** @type {any} */ row) => can("models:edit") && html`<button onClick=${() => rehearse(row.name)}>Switch<span class="unseen"> to ${row.name}</span></button>` },
  ];
  const begun = allOperations().filter(isBegunHere);
  return html`<div class="row tools"><span class="faint grow">${KIND.about}</span>
      ${can("models:edit") && html`<button onClick=${() => go("settings/profiles/new")}>New profile</button>
        <button class="main" onClick=${() => setSaving(true)}>Save current state</button>`}</div>
    <${ErrorNote} error=${error} />
    ${begun.length > 0 && html`<section class="panel" aria-label="Operations">${begun.map((operation) => html`<${OperationNote} key=${operation.name} operation=${operation} onDismiss=${() => dismiss(operation)} />`)}</section>`}
    <${LiveNote} live=${live} />
    ${live.isComplete && html`<${Table} label="Profiles" rows=${rows} rowKey=${(/** @type {any} */ row) => row.name} columns=${columns}
      empty="There are no profiles. Save the current state, load or declare something else, and save that under another name." />`}
    ${changes.length > 0 && html`<section class="panel" aria-label="Differences from the active profile"><h2>Differences from the active profile</h2>
      <ul class="reasons">${changes.map((change) => html`<li key=${change}>${change}</li>`)}</ul></section>`}
    ${isSaving && html`<${SaveDialog} onClose=${() => setSaving(false)} />`}
    ${plan && html`<${SwitchDialog} plan=${plan} onClose=${() => setPlan(null)} />`}`;
}

/** How many documents a profile declares. @param {any} row */
const documentsOf = (row) => ["models", "agents", "routes", "aliases"].reduce((sum, field) => sum + (row[field]?.length ?? 0), 0);

/** What is not as the active profile says, asked for again when something of the mesh has changed.
 * @param {any} active @returns {string[]} */
function useChanges(active) {
  const [changes, setChanges] = useState(/** @type {string[]} */ ([]));
  const watched = ["profile", "agent", "route", "alias", "model"].map((kind) => collection(kind).value);
  useEffect(() => {
    if (!active) return setChanges([]);
    const timer = setTimeout(() => {
      get(`/api/v1/profiles/${segment(active.name)}`).then((found) => setChanges(found.status?.changes ?? []), () => setChanges([]));
    }, COMPARE_MILLISECONDS);
    return () => clearTimeout(timer);
  }, [active?.name, ...watched]);
  return changes;
}

/** @param {{onClose: () => void}} props */
function SaveDialog({ onClose }) {
  const [fields, setFields] = useState({ name: "", description: "", leaveOthers: false });
  const [results, setResults] = useState(/** @type {any[] | null} */ (null));
  const [error, setError] = useState(/** @type {unknown} */ (null));
  const body = { description: fields.description, leaveOthers: fields.leaveOthers };
  /** @param {Partial<typeof fields>} changed */
  const change = (changed) => {
    setFields({ ...fields, ...changed });
    setResults(null);
  };
  /** @param {Event} event */
  const submit = async (event) => {
    event.preventDefault();
    setError(null);
    try {
      if (!fields.name) throw new Error("A name is required.");
      const answer = await post(`/api/v1/profiles/${segment(fields.name)}/save`, body, { query: { dryRun: results === null || undefined } });
      if (results === null) return setResults(answer.results);
      notify(`profile ${fields.name} ${answer.results[0].outcome}`);
      onClose();
    } catch (failure) {
      setError(failure);
    }
  };
  return html`<${Dialog} title="Save current state" onClose=${onClose} isWide>
    <form onSubmit=${submit} novalidate>
      <p class="faint">All declared models, agents, routes and aliases, and the loaded models with their options. It becomes the active profile.</p>
      <div class="fields">
        <label>Name <input name="name" value=${fields.name} autocomplete="off" spellcheck=${false} onInput=${(/** @type {any} */ event) => change({ name: event.target.value.trim() })} /></label>
        <label>Description <input name="description" value=${fields.description} autocomplete="off" onInput=${(/** @type {any} */ event) => change({ description: event.target.value })} /></label>
        <label class="inline"><input type="checkbox" name="leaveOthers" checked=${fields.leaveOthers} onChange=${(/** @type {any} */ event) => change({ leaveOthers: event.target.checked })} />
          A switch to it leaves other models loaded</label>
      </div>
      ${results && html`<${Results} results=${results} />`}
      <${Code} label="Command" text=${command("mesh", "profile", "save", fields.name || "NAME", ["--description", fields.description], ["--leave-others", fields.leaveOthers])} />
      <${ErrorNote} error=${error} />
      <div class="buttons"><button type="button" onClick=${onClose}>Cancel</button>
        <button type="submit" class="main">${results ? "Save" : "Show changes"}</button></div>
    </form>
  </${Dialog}>`;
}

/** @param {{plan: any, onClose: () => void}} props */
function SwitchDialog({ plan, onClose }) {
  const act = async () => {
    const done = await post(`/api/v1/profiles/${segment(plan.name)}/switch`);
    notify(`switched to profile ${plan.name}`);
    for (const { step, model, operation, problem } of done.steps) {
      if (problem) notify(`cannot ${step} ${model}: ${problem}`, { isError: true });
      else follow(await get(`/v1/admin/operations/${segment(operation.replace(/^operations\//, ""))}`));
    }
  };
  return html`<${PlanDialog} label=${`Switch to ${plan.name}`} results=${plan.results} action="Switch" onDo=${act} onClose=${onClose}
    text=${command("mesh", "profile", "switch", plan.name)}>
    <h3>Models</h3>
    ${plan.steps.length
      ? html`<ul class="reasons" aria-label="Models">${plan.steps.map((/** @type {any} */ { step, model }) => html`<li key=${model}>${step} ${model}</li>`)}</ul>
          <p class="faint">Models are drained and unloaded first, then others are loaded.</p>`
      : html`<p class="faint">Loaded models do not change.</p>`}
  </${PlanDialog}>`;
}
