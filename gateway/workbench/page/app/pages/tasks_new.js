// The form that submits a task: a text or a whole request for one of the endpoints.
import { html, useEffect, useMemo, useState } from "../parts/html.js";
import { get, post } from "../api.js";
import { go } from "../navigation.js";
import { Dialog } from "../parts/dialog.js";
import { notify } from "../parts/notices.js";
import { Code, ErrorNote } from "../parts/widgets.js";
import { ENDPOINTS } from "../request_lines.js";

/** What of a body the text is, by endpoint. @type {Record<string, (text: string) => object>} */
const BODIES = {
  "/v1/chat/completions": (text) => ({ messages: [{ role: "user", content: text }] }),
  "/v1/completions": (text) => ({ prompt: text }),
  "/v1/embeddings": (text) => ({ input: text }),
  "/v1/responses": (text) => ({ input: text, store: false }),
};

/** @param {{onClose: () => void}} props */
export function NewTask({ onClose }) {
  const [form, setForm] = useState({ model: "", endpoint: ENDPOINTS[0], text: "", further: "", limit: "", attempts: "2", waits: false });
  const [error, setError] = useState(/** @type {unknown} */ (null));
  const [isBusy, setBusy] = useState(false);
  // A submission that is sent again, as after a broken connection, is the same task.
  const idempotencyKey = useMemo(randomKey, [form]);
  const models = useModelNames();
  /** @param {Partial<typeof form>} change */
  const set = (change) => setForm((old) => ({ ...old, ...change }));
  const further = parsed(form.further);
  const body = {
    model: form.model.trim(),
    endpoint: form.endpoint,
    body: { ...BODIES[form.endpoint](form.text), ...further.value },
    ...(form.limit && { pending_limit_seconds: Number(form.limit) }),
    ...(form.attempts && { max_attempts: Number(form.attempts) }),
    ...(form.waits && { wait_for_model: true }),
  };
  /** @param {Event} event */
  const submit = async (event) => {
    event.preventDefault();
    setBusy(true);
    setError(null);
    try {
      const task = await post("/api/v1/inference-tasks", body, { headers: { "Idempotency-Key": idempotencyKey } });
      notify(`${task.id} is accepted.`);
      onClose();
      go(`tasks/${task.id}`);
    } catch (failure) {
      setError(failure);
      setBusy(false);
    }
  };
  return html`<${Dialog} title="New task" onClose=${onClose} isWide=${true}>
    <form onSubmit=${submit}>
      <div class="split">
        <label>Model <input list="task-models" required value=${form.model} spellcheck=${false} autocomplete="off" onInput=${on(set, "model")} /></label>
        <label>Endpoint <select value=${form.endpoint} onChange=${on(set, "endpoint")}>
          ${ENDPOINTS.map((path) => html`<option key=${path} value=${path}>${path}</option>`)}</select></label>
      </div>
      <datalist id="task-models">${models.map((name) => html`<option key=${name} value=${name}></option>`)}</datalist>
      <label>Text <textarea rows="4" required=${!further.value} value=${form.text} onInput=${on(set, "text")}></textarea></label>
      <label>Further fields of the request, as JSON
        <textarea class="short mono" rows="2" value=${form.further} spellcheck=${false} placeholder=${'{"max_tokens": 200}'} aria-invalid=${Boolean(further.problem)} onInput=${on(set, "further")}></textarea></label>
      ${further.problem && html`<p class="problem" role="alert">${further.problem}</p>`}
      <div class="split">
        <label>Queue timeout (s) <input type="number" min="1" max="604800" placeholder="Default" value=${form.limit} onInput=${on(set, "limit")} /></label>
        <label>Max attempts <input type="number" min="1" max="100" placeholder="Default" value=${form.attempts} onInput=${on(set, "attempts")} /></label>
      </div>
      <label class="inline"><input type="checkbox" checked=${form.waits} onChange=${(/** @type {any} */ event) => set({ waits: event.target.checked })} />
        Accept a model that the mesh does not have yet, and wait for it</label>
      <details><summary>Code</summary><${Code} label="Code" text=${`POST /api/v1/inference-tasks\nIdempotency-Key: ${idempotencyKey}\n\n${JSON.stringify(body, null, 2)}`} /></details>
      <${ErrorNote} error=${error} />
      <div class="buttons"><button type="button" onClick=${onClose}>Cancel</button>
        <button type="submit" class="main" disabled=${isBusy || Boolean(further.problem)}>Submit</button></div>
    </form>
  </${Dialog}>`;
}

/** @param {(change: any) => void} set @param {string} name */
const on = (set, name) => (/** @type {any} */ event) => set({ [name]: event.target.value });

/** The members that a text adds to a body. @param {string} text @returns {{value?: object, problem?: string}} */
function parsed(text) {
  if (!text.trim()) return {};
  try {
    const value = JSON.parse(text);
    return typeof value === "object" && value !== null && !Array.isArray(value) ? { value } : { problem: "Further fields must be a JSON object." };
  } catch (error) {
    return { problem: error instanceof Error ? error.message : String(error) };
  }
}

/** Names that a request may name; none where they cannot be read: any name may be typed. */
function useModelNames() {
  const [names, setNames] = useState(/** @type {string[]} */ ([]));
  useEffect(() => {
    get("/v1/models").then(
      (found) => setNames(found.data.map((/** @type {any} */ model) => model.id)),
      () => {},
    );
  }, []);
  return names;
}

/** Unlike randomUUID there is one of these for pages over plain HTTP too. */
function randomKey() {
  return [...crypto.getRandomValues(new Uint8Array(16))].map((byte) => byte.toString(16).padStart(2, "0")).join("");
}
