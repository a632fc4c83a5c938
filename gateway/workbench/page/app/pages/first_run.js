// The first steps of a mesh without a model: what is on its machine, a model by its name, a server by its address.
import { html, useEffect, useState } from "../parts/html.js";
import { get, post } from "../api.js";
import { can } from "../session.js";
import { command } from "../parts/commands.js";
import { bytes } from "../parts/format.js";
import { attempt } from "../parts/notices.js";
import { follow } from "../parts/operations.js";
import { Code, ErrorNote } from "../parts/widgets.js";
import { AddDialog } from "./models_add.js";

const EXAMPLE = "hf:Qwen/Qwen3-0.6B-GGUF:Q8_0";
const SHOWN_MODELS = 6;

/** Shown where the mesh has no model. */
export function FirstRun() {
  const [way, setWay] = useState(/** @type {"" | "serve" | "attach"} */ (""));
  if (!can("operations:create")) return html`<p class="faint empty">No models yet. A key with operations:create can add one.</p>`;
  return html`<section class="panel first-run" aria-label="First steps"><h2>This mesh has no models yet</h2>
      <${Found} />
      <div class="split">
        <div><h3>A model by name</h3><p>From the Hugging Face hub, or a file. It is pulled, sized for this machine and served.</p>
          <button class="main" onClick=${() => setWay("serve")}>Serve a model</button><${Code} label="Command" text=${command("load", EXAMPLE)} /></div>
        <div><h3>A running server</h3><p>Ollama, LM Studio, vLLM, llama.cpp or any OpenAI-compatible server: all its models are served.</p>
          <button class="main" onClick=${() => setWay("attach")}>Attach a server</button><${Code} label="Command" text=${command("models", "attach", "http://box.lan:11434")} /></div>
      </div>
    </section>
    ${way && html`<${AddDialog} first=${way} source=${way === "serve" ? EXAMPLE : ""} onClose=${() => setWay("")} />`}`;
}

/** Engines and model files on the mesh's machine. */
function Found() {
  const [state, setState] = useState(/** @type {{found: any, error: unknown}} */ ({ found: null, error: null }));
  const [looks, setLooks] = useState(0);
  useEffect(() => {
    if (!can("operations:view")) return;
    const abort = new AbortController();
    get("/v1/admin/discovered", {}, abort.signal).then(
      (found) => setState({ found, error: null }),
      (error) => abort.signal.aborted || setState({ found: null, error }),
    );
    return () => abort.abort();
  }, [looks]);
  const { found, error } = state;
  if (error) return html`<${ErrorNote} error=${error} />`;
  if (!found) return html`<p class="faint" role="status">Looking for engines and models on this machine…</p>`;
  /** @param {string} source @param {string} name */
  const serve = (source, name) => attempt(async () => follow(await post("/v1/admin/models", name ? { source, name } : { source })), `${name || source} is being served.`);
  const rows = [
    ...found.servers.map((/** @type {any} */ each) => ({ ...each, name: "", words: each.detail || modelsText(each.models) })),
    ...found.files.map((/** @type {any} */ each) => ({ ...each, title: each.name, words: `${each.source} · ${bytes(each.file.sizeBytes)}` })),
  ];
  return html`<h3>On this machine</h3>
    ${rows.map(
      (row) => html`<div class="row found" key=${row.source}><strong>${row.title}</strong><span class="faint grow">${row.words}</span>
        ${row.served ? html`<span class="faint">served</span>` : !row.detail && html`<button aria-label=${`Serve ${row.title}`} onClick=${() => serve(row.source, row.name)}>Serve</button>`}</div>`,
    )}
    ${rows.length ? "" : html`<p class="faint">No engine responds on the usual ports, and no model files of other programs were found. <button class="quiet" onClick=${() => setLooks(looks + 1)}>Look again</button></p>`}`;
}

/** @param {string[]} models */
function modelsText(models) {
  if (!models.length) return "no models yet";
  const more = models.length > SHOWN_MODELS ? ` and ${models.length - SHOWN_MODELS} more` : "";
  return `${models.slice(0, SHOWN_MODELS).join(", ")}${more}`;
}
