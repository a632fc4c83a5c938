// One document: as a form or as JSON, the difference that it would make, and applied only after that was shown.
import { html, useState } from "../parts/html.js";
import { put, remove, segment } from "../api.js";
import { collection } from "../live.js";
import { address, go } from "../navigation.js";
import { can } from "../session.js";
import { command } from "../parts/commands.js";
import { Confirm, Dialog } from "../parts/dialog.js";
import { notify } from "../parts/notices.js";
import { Code, ErrorNote, LiveNote } from "../parts/widgets.js";
import { Results } from "./settings_diff.js";
import { FormField } from "./settings_fields.js";
import { declaredOf, fixedBecause, isPublished, sendable } from "./settings_kinds.js";

/** @param {{kind: import("./settings_kinds.js").Kind, name: string}} props */
export function DocumentEditor({ kind, name }) {
  const live = collection(kind.kind).value;
  const shown = live.items.get(name);
  const back = html`<p class="back"><a href=${address(`settings/${kind.plural}`)}>${kind.title}</a></p>`;
  if (!live.isComplete) return html`${back}<h1>${name || `New ${kind.one}`}</h1><${LiveNote} live=${live} />`;
  if (name && !shown) return html`${back}<h1>${name}</h1><p>There is no ${kind.one} of this name.</p>`;
  return html`${back}<${Editor} kind=${kind} shown=${shown} />`;
}

/** @param {{kind: import("./settings_kinds.js").Kind, shown: any}} props */
function Editor({ kind, shown }) {
  const [read, setRead] = useState(() => declaredOf(shown ?? { kind: kind.kind, name: "", ...kind.empty }));
  const [document, setDocument] = useState(read);
  /** What is written as JSON, while it is edited as such. */
  const [text, setText] = useState(/** @type {string | null} */ (null));
  const [plan, setPlan] = useState(/** @type {{body: any, results: any[]} | null} */ (null));
  const [error, setError] = useState(/** @type {unknown} */ (null));
  const [isBusy, setBusy] = useState(false);
  const [isDeleting, setDeleting] = useState(false);
  const fixed = fixedBecause(shown);
  const adopt = isPublished(shown);
  const isOutdated = shown && JSON.stringify(declaredOf(shown)) !== JSON.stringify(read);
  const mayEdit = can(`${kind.rights}:edit`) && !fixed;

  /** What would be sent; raises where the text is no JSON. */
  const body = () => (text === null ? sendable(kind, document) : JSON.parse(text));
  const toggle = () => {
    try {
      if (text !== null) setDocument(body());
      setText(text === null ? JSON.stringify(sendable(kind, document), null, 2) : null);
      setError(null);
    } catch (failure) {
      setError(failure instanceof SyntaxError ? new Error(`This is not JSON: ${failure.message}`) : failure);
    }
  };
  /** @param {any} wanted @param {boolean} dryRun */
  const send = (wanted, dryRun) => put(`/api/v1/${kind.plural}/${segment(wanted.name)}`, wanted, { query: { dryRun: dryRun || undefined, adopt: adopt || undefined } });
  /** @param {Event} event */
  const rehearse = async (event) => {
    event.preventDefault();
    setBusy(true);
    setError(null);
    try {
      const wanted = body();
      if (!wanted?.name) throw new Error("A name is required.");
      setPlan({ body: wanted, results: (await send(wanted, true)).results });
    } catch (failure) {
      setError(failure instanceof SyntaxError ? new Error(`This is not JSON: ${failure.message}`) : failure);
    }
    setBusy(false);
  };
  const apply = async () => {
    const { body: wanted } = /** @type {{body: any}} */ (plan);
    const [result] = (await send(wanted, false)).results;
    notify(`${kind.one} ${wanted.name} ${result.outcome}`);
    go(`settings/${kind.plural}`);
  };
  const reload = () => {
    setRead(declaredOf(shown));
    setDocument(declaredOf(shown));
    setText(null);
  };
  const title = shown ? shown.name : `New ${kind.one}`;
  return html`<div class="row title"><h1 class=${shown ? "mono" : ""}>${title}</h1>
      ${shown && mayEdit && html`<button onClick=${() => setDeleting(true)}>Delete</button>`}</div>
    ${fixed && html`<p class="problem" role="status">${fixed}</p>`}
    ${adopt && html`<p class="faint" role="status">A runner publishes it. If you apply it here, your declaration takes precedence.</p>`}
    ${isOutdated && html`<p class="problem" role="status">It has changed since it was opened. <button onClick=${reload}>Reload</button></p>`}
    <form class="panel" onSubmit=${rehearse} novalidate>
      ${text === null
        ? html`<div class="fields">${kind.fields.map((field) => html`<${FormField} key=${field.name} field=${field} document=${document} onChange=${setDocument}
            isFixed=${!mayEdit || (field.name === "name" && Boolean(shown))} />`)}</div>`
        : html`<label>JSON <textarea class="mono" spellcheck=${false} value=${text} readonly=${!mayEdit} onInput=${(/** @type {any} */ event) => setText(event.target.value)}></textarea></label>`}
      <${ErrorNote} error=${error} />
      <div class="buttons"><button type="button" class="quiet" onClick=${toggle}>${text === null ? "Edit as JSON" : "Edit as a form"}</button>
        ${mayEdit && html`<button type="submit" class="main" disabled=${isBusy}>Show changes</button>`}</div>
    </form>
    ${plan && html`<${PlanDialog} label=${`Apply ${kind.one} ${plan.body.name}`} results=${plan.results} onDo=${apply} onClose=${() => setPlan(null)}
      text=${command("apply", "-f", `${plan.body.name}.yaml`, ["--adopt", adopt])} />`}
    ${isDeleting && html`<${Confirm} title=${`Delete ${kind.one} ${shown.name}`} action="Delete" isDangerous onClose=${() => setDeleting(false)}
      text=${html`<p>${kind.afterDeletion}</p>
        <${Code} label="Command" text=${command("delete", kind.kind, shown.name)} />`}
      onDo=${async () => {
        await remove(`/api/v1/${kind.plural}/${segment(shown.name)}`);
        notify(`${kind.one} ${shown.name} deleted`);
        go(`settings/${kind.plural}`);
      }} />`}`;
}

/** Shows what would be done, and does it. @param {{label: string, results: any[], text: string, onDo: () => Promise<unknown>, onClose: () => void, children?: any, action?: string}} props */
export function PlanDialog({ label, results, text, onDo, onClose, children, action = "Apply" }) {
  const [error, setError] = useState(/** @type {unknown} */ (null));
  const [isBusy, setBusy] = useState(false);
  const act = async () => {
    setBusy(true);
    try {
      await onDo();
      onClose();
    } catch (failure) {
      setError(failure);
      setBusy(false);
    }
  };
  return html`<${Dialog} title=${label} onClose=${onClose} isWide>
    <${Results} results=${results} />
    ${children}
    <${Code} label="Command" text=${text} />
    <${ErrorNote} error=${error} />
    <div class="buttons"><button onClick=${onClose}>Back</button><button class="main" disabled=${isBusy} onClick=${act}>${action}</button></div>
  </${Dialog}>`;
}
