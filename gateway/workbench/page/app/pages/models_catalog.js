// The catalog: engines and files found on the machine, short names and the hub's models, with what a load of each would need.
import { html, useEffect, useState } from "../parts/html.js";
import { get, post } from "../api.js";
import { collection } from "../live.js";
import { address } from "../navigation.js";
import { can } from "../session.js";
import { count } from "../parts/format.js";
import { attempt } from "../parts/notices.js";
import { allOperations, follow, hasEnded, OperationNote } from "../parts/operations.js";
import { ErrorNote } from "../parts/widgets.js";
import { AddDialog, FitText } from "./models_add.js";
import { ChatLink, ModelState } from "./models_view.js";

const SEARCH_MILLISECONDS = 300;
const SHOWN_MODELS = 6;

/** @typedef {import("./models_add.js").Variant} Variant */
/** @typedef {{data: any, error: unknown}} Answer */
/** @typedef {{way: import("./models_add.js").Way, source: string, name: string}} Chosen */

/** Everything that could be served. Its page watches `model` and `operation`. */
export function Catalog() {
  const [typed, setTyped] = useState("");
  const [chosen, setChosen] = useState(/** @type {Chosen | null} */ (null));
  const catalog = useAnswer("/v1/admin/catalog", typed);
  const found = useAnswer(can("operations:view") ? "/v1/admin/discovered" : "", "");
  const cards = [...foundCards(found.data, typed), ...modelCards(catalog.data)];
  const isSearching = !catalog.data && !catalog.error;
  return html`<section class="catalog" aria-label="Catalog">
    <div class="row tools">
      <label class="inline grow">Search <input type="search" class="grow" value=${typed} placeholder="name, such as qwen3 8b"
        onInput=${(/** @type {any} */ event) => setTyped(event.target.value)} /></label>
      <button onClick=${() => setChosen({ way: "serve", source: "", name: "" })}>Add by source</button>
      <button onClick=${() => setChosen({ way: "attach", source: "", name: "" })}>Attach a server</button>
    </div>
    <${ErrorNote} error=${catalog.error} /><${ErrorNote} error=${found.error} />
    ${catalog.data?.hubDetail && html`<p class="problem" role="status">No models of the hub: ${catalog.data.hubDetail}. Short names and what is on this machine are listed.</p>`}
    <p class="faint" role="status">${isSearching ? "Searching…" : `${cards.length} ${cards.length === 1 ? "entry" : "entries"}`}</p>
    <ul class="grid cards" aria-busy=${isSearching}>${cards.map((card) => html`<${Card} key=${card.key} card=${card} onChoose=${setChosen} />`)}</ul>
    ${chosen && html`<${AddDialog} first=${chosen.way} source=${chosen.source} name=${chosen.name} onClose=${() => setChosen(null)} />`}
  </section>`;
}

/** What a path answers to a text, asked a moment after the last change. @param {string} path @param {string} text */
function useAnswer(path, text) {
  const [answer, setAnswer] = useState(/** @type {Answer} */ ({ data: null, error: null }));
  useEffect(() => {
    if (!path) return;
    const abort = new AbortController();
    const ask = () =>
      get(path, text ? { q: text } : {}, abort.signal).then(
        (data) => setAnswer({ data, error: null }),
        (error) => abort.signal.aborted || setAnswer({ data: null, error }),
      );
    const timer = setTimeout(ask, text ? SEARCH_MILLISECONDS : 0);
    return () => {
      clearTimeout(timer);
      abort.abort();
    };
  }, [path, text]);
  return answer;
}

/**
 * @typedef {{key: string, title: string, name: string, about: string, variants: Variant[], isServed?: boolean, detail?: string, isHere?: boolean, models?: string[]}} CardOf
 * `name`: under which it would be served; "": derived. `models`: of an engine. `isHere`: it needs no pull. `detail`: why it cannot be served.
 */

/** @param {any} found @param {string} typed @returns {CardOf[]} */
function foundCards(found, typed) {
  const words = typed.toLowerCase().split(/\s+/).filter(Boolean);
  const servers = (found?.servers ?? []).map((/** @type {any} */ { title, source, models, detail, served }) => ({
    key: source, title, name: "", about: detail || modelsText(models), variants: [{ source }], isServed: served, detail, isHere: true, models,
  }));
  const files = (found?.files ?? []).map((/** @type {any} */ { name, source, file, served }) => ({
    key: source, title: name, name, about: source, variants: [{ source, sizeBytes: file.sizeBytes }], isServed: served, isHere: true,
  }));
  return [...servers, ...files].filter(({ title, about, models = [] }) => words.every((word) => `${title} ${about} ${models.join(" ")}`.toLowerCase().includes(word)));
}

/** @param {any} catalog @returns {CardOf[]} */
const modelCards = (catalog) =>
  (catalog?.models ?? []).map((/** @type {any} */ { name, variants, contextTokens, downloads }) => ({
    key: name, title: name, name: name.includes("/") ? "" : name, variants,
    about: [variants[0].source, contextTokens && `${count(contextTokens)} context`, downloads && `${count(downloads)} downloads`].filter(Boolean).join(" · "),
  }));

/** @param {string[]} models */
function modelsText(models) {
  if (!models.length) return "no models yet";
  const more = models.length > SHOWN_MODELS ? ` and ${models.length - SHOWN_MODELS} more` : "";
  return `${models.slice(0, SHOWN_MODELS).join(", ")}${more}`;
}

/** @param {{card: CardOf, onChoose: (chosen: Chosen) => void}} props */
function Card({ card, onChoose }) {
  const [source, setSource] = useState(card.variants[0].source);
  const variant = card.variants.find((each) => each.source === source) ?? card.variants[0];
  const action = card.isHere || variant.stored ? "Serve" : "Pull and serve";
  const operations = allOperations().filter((each) => each.action.source === source);
  const operation = operations.find((each) => !hasEnded(each));
  const isServed = card.isServed || operations.some((each) => each.state === "succeeded");
  const models = [...collection("model").value.items.values()];
  const served = models.find((model) => model.status?.instance?.addedSource === source) ?? (isServed ? models.find((model) => [card.name, ...(card.models ?? [])].includes(model.name)) : undefined);
  /** Needs no choices: it is on this machine. */
  const serve = () => attempt(async () => follow(await post("/v1/admin/models", { source, ...(card.name && { name: card.name }) })), `${card.title} is being served.`);
  return html`<li class="card"><div class="row"><strong class="grow">${card.title}</strong>
      ${served ? html`<${ModelState} model=${served} />` : card.isServed ? html`<span class="faint">served</span>` : card.isHere || variant.stored ? html`<span class="faint">on this machine</span>` : ""}</div>
    <p class="faint">${card.about}</p>
    ${operation
      ? html`<${OperationNote} operation=${operation} />`
      : html`<div class="row">
          ${card.variants.length > 1 &&
          html`<select aria-label=${`Quantization of ${card.title}`} value=${source} onChange=${(/** @type {any} */ event) => setSource(event.target.value)}>
            ${card.variants.map((each) => html`<option key=${each.source} value=${each.source}>${each.quantization || each.source}</option>`)}</select>`}
          <span class="grow">${card.variants.length === 1 && variant.quantization ? `${variant.quantization} · ` : ""}${!(card.isHere && !variant.sizeBytes) && html`<${FitText} variant=${variant} isEstimated=${!card.isHere} />`}</span>
          ${served
            ? html`<${ChatLink} model=${served} /><a href=${address(`models/${served.name}`)}>Details</a>`
            : !card.isServed && !card.detail && can("operations:create") &&
              html`<button aria-label=${`${action} ${card.title}`} onClick=${card.isHere ? serve : () => onChoose({ way: "serve", source, name: card.name })}>${action}</button>`}
        </div>`}
  </li>`;
}
