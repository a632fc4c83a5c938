// The dialog that adds a model: by its source, its files alone, or all models of a running server.
import { html, useEffect, useState } from "../parts/html.js";
import { get, post } from "../api.js";
import { collection } from "../live.js";
import { command } from "../parts/commands.js";
import { Dialog } from "../parts/dialog.js";
import { bytes, toNumber } from "../parts/format.js";
import { follow } from "../parts/operations.js";
import { Code, ErrorNote } from "../parts/widgets.js";
import { numberOrText } from "./models_load.js";

/** What can be added: what it is called, what it needs of a runner, and the fields that it has. */
const WAYS = {
  serve: { title: "Serve a model", action: "Pull and serve", ability: "addsModels" },
  pull: { title: "Pull only", action: "Pull", ability: "addsModels" },
  attach: { title: "Attach a server", action: "Attach", ability: "attachesServers" },
};
/** @typedef {keyof typeof WAYS} Way */
/** @typedef {{source: string, name: string, runner: string, context: string, form: string, key: string, remote: string}} Fields */

const EMPTY = { source: "", name: "", runner: "", context: "", form: "", key: "", remote: "" };

/** The path, the body and the command of a call. @param {Way} way @param {Fields} fields */
export function addCall(way, { source, name, runner, context, form, key, remote }) {
  if (way === "pull") {
    return {
      path: "/v1/admin/pulls",
      body: defined({ source, runner, form }),
      text: command("pull", source || "SOURCE", ["--runner", runner], ["--form", form]),
    };
  }
  if (way === "serve") {
    return {
      path: "/v1/admin/models",
      body: defined({ source, name, runner, contextTokens: context && numberOrText(context) }),
      text: command("load", source || "SOURCE", ["--name", name], ["--runner", runner], ["--ctx", context]),
    };
  }
  const parameters = defined({ api_key_env: key, remote: remote && remote === "yes" });
  return {
    path: "/v1/admin/models",
    body: { ...defined({ source: source.includes("://") ? source : source && `http://${source}`, name, runner }), parameters },
    text: command("models", "attach", source || "URL", ["--name", name], ["--runner", runner], ["--api-key-env", key], [remote === "no" ? "--no-remote" : "--remote", remote !== ""]),
  };
}

/** Those that have a value. @param {Record<string, any>} fields */
const defined = (fields) => Object.fromEntries(Object.entries(fields).filter(([, value]) => value !== ""));

/** @param {{onClose: () => void, first?: Way, source?: string, name?: string}} props */
export function AddDialog({ onClose, first = "serve", source = "", name = "" }) {
  const [way, setWay] = useState(/** @type {Way} */ (first));
  const [fields, setFields] = useState(/** @type {Fields} */ ({ ...EMPTY, source, name }));
  const [error, setError] = useState(/** @type {unknown} */ (null));
  const [isBusy, setBusy] = useState(false);
  const call = addCall(way, fields);
  /** @param {Event} event */
  const submit = async (event) => {
    event.preventDefault();
    setBusy(true);
    try {
      follow(await post(call.path, call.body));
      onClose();
    } catch (failure) {
      setError(failure);
      setBusy(false);
    }
  };
  /** A field with its label. @param {keyof Fields} name @param {string} label @param {string} [placeholder] */
  const text = (name, label, placeholder = "") => html`<label>${label} <input name=${name} value=${fields[name]} placeholder=${placeholder} spellcheck=${false}
    autocomplete="off" onInput=${(/** @type {any} */ event) => setFields({ ...fields, [name]: event.target.value })} /></label>`;
  /** A choice with its label. @param {keyof Fields} name @param {string} label @param {[string, string][]} options */
  const choice = (name, label, options) => html`<label>${label} <select name=${name} value=${fields[name]}
    onChange=${(/** @type {any} */ event) => setFields({ ...fields, [name]: event.target.value })}>
    ${options.map(([value, shown]) => html`<option key=${value} value=${value}>${shown}</option>`)}</select></label>`;
  const able = [...collection("runner").value.items.values()].filter((runner) => runner.status?.[WAYS[way].ability]);
  /** @type {[string, string][]} */
  const runners = [["", "Automatic"], ...able.map((runner) => /** @type {[string, string]} */ ([runner.name, runner.name]))];
  return html`<${Dialog} title="Add a model" onClose=${onClose} isWide>
    <form onSubmit=${submit} novalidate>
      <div class="row" role="radiogroup" aria-label="How">
        ${Object.entries(WAYS).map(
          ([key, { title }]) => html`<label class="inline" key=${key}><input type="radio" name="way" value=${key} checked=${way === key}
            onChange=${() => { setWay(/** @type {Way} */ (key)); setError(null); }} /> ${title}</label>`,
        )}</div>
      ${way === "attach" ? text("source", "Address", "http://box.lan:11434") : text("source", "Source", "hf:Qwen/Qwen3-8B-GGUF:Q4_K_M")}
      <p class="faint">${HELP[way]}</p>
      ${way !== "attach" && html`<${Quantizations} source=${fields.source} onChoose=${(/** @type {string} */ chosen) => setFields({ ...fields, source: chosen })} />`}
      <div class="fields">
        ${way !== "pull" && text("name", "Name", way === "attach" ? "Derived from address" : "Derived from source")}
        ${choice("runner", "Runner", runners)}
        ${way === "serve" && text("context", "Context (tokens)", "Auto")}
        ${way === "pull" && choice("form", "Form", [["", "GGUF if available"], ["gguf", "GGUF"], ["folder", "folder of safetensors"]])}
        ${way === "attach" && text("key", "API key variable", "in the runner's environment")}
        ${way === "attach" && choice("remote", "Remote", [["", "by its address"], ["no", "no"], ["yes", "yes"]])}
      </div>
      <${Code} label="Command" text=${call.text} />
      <${ErrorNote} error=${error} />
      <div class="buttons"><button type="button" onClick=${onClose}>Cancel</button>
        <button type="submit" class="main" disabled=${isBusy}>${WAYS[way].action}</button></div>
    </form>
  </${Dialog}>`;
}

/** @typedef {{source: string, quantization?: string, sizeBytes?: number | string, neededBytes?: number | string, lackingBytes?: number | string, stored?: boolean}} Variant */

/** The size of a model, and whether the mesh has memory for it. `isEstimated`: the size is from its name.
 * @param {{variant: Variant, isEstimated?: boolean}} props */
export function FitText({ variant: { sizeBytes, neededBytes, lackingBytes }, isEstimated = false }) {
  const lacking = toNumber(lackingBytes);
  const fit = lacking ? `needs ${bytes(lacking)} more` : neededBytes && "fits here";
  return html`${sizeBytes ? `${isEstimated ? "~ " : ""}${bytes(sizeBytes)}` : "size unknown"}
    ${fit && html` <span class=${lacking ? "state busy" : "state good"} title=${`about ${bytes(neededBytes)} of memory`}>${fit}</span>`}`;
}

/** The quantizations of a repository with their sizes, as the hub lists them. @param {{source: string, onChoose: (source: string) => void}} props */
function Quantizations({ source, onChoose }) {
  const [variants, setVariants] = useState(/** @type {Variant[]} */ ([]));
  const repository = source.match(HUB)?.[1] ?? "";
  useEffect(() => {
    setVariants([]);
    if (!repository) return;
    const abort = new AbortController();
    // A source that is not there is reported by the pull.
    const ask = () => get("/v1/admin/catalog", { source: repository }, abort.signal).then((found) => setVariants(found.models[0].variants), () => {});
    const timer = setTimeout(ask, ASK_MILLISECONDS);
    return () => {
      clearTimeout(timer);
      abort.abort();
    };
  }, [repository]);
  if (!variants.length) return null;
  const chosen = variants.some((each) => each.source === source) ? source : variants[0].source;
  return html`<fieldset class="quantizations"><legend class="unseen">Quantization</legend>
    ${variants.map(
      (each) => html`<label class="inline" key=${each.source}><input type="radio" name="quantization" checked=${each.source === chosen} onChange=${() => onChoose(each.source)} />
        <span class="grow">${each.quantization || "all files"}</span><${FitText} variant=${each} />${each.stored && html`<span class="faint">stored</span>`}</label>`,
    )}</fieldset>`;
}

/** A repository of the hub, without its quantization. */
const HUB = /^(hf:[^/:@\s]+\/[^/:@\s]+)/;
const ASK_MILLISECONDS = 300;

const HELP = {
  serve: "A model of the Hugging Face hub by name, or a file on the runner's machine. It is pulled, served and loaded; weft.yaml is not changed.",
  pull: "Its files are pulled to the runner's home. A cancelled pull can be continued.",
  attach: "All models that the server lists are served, and changes of its list are followed. weft never starts or stops the server.",
};
