// The captured prompt and answer of a request, shown when someone asks: each reading is in the audit log.
import { html, useState } from "../parts/html.js";
import { get } from "../api.js";
import { address } from "../navigation.js";
import { can } from "../session.js";
import { Code, ErrorNote } from "../parts/widgets.js";
import { contentPathOf } from "./requests_words.js";

/** @param {{record: any}} props */
export function Content({ record }) {
  const [found, setFound] = useState(/** @type {any} */ (null));
  const [error, setError] = useState(/** @type {unknown} */ (null));
  if (record.state !== "ended") return null;
  const { requestId, tenant, receipt } = record;
  const show = () => get(contentPathOf(requestId), { allTenants: true }).then(setFound, setError);
  return html`<section class="panel"><h2>Prompt and answer</h2>
    ${!receipt?.captured && html`<p class="faint">Not captured. To capture the next requests, declare ${can("settings:edit") ? html`<a href=${address(`settings/tenants/${tenant}`)}>tenant ${tenant}</a>` : `tenant ${tenant}`} with <code>capture: true</code>.</p>`}
    ${receipt?.captured && !can("secrets:edit") && html`<p class="faint">Captured. Your key lacks <code>secrets:edit</code>, which reading needs.</p>`}
    ${receipt?.captured && can("secrets:edit") && !found && html`<p class="row"><button onClick=${show}>Show</button><span class="faint">Each reading is recorded in the audit log.</span></p>`}
    <${ErrorNote} error=${error} />
    ${found && ["prompt", "answer"].map((part) => html`<${Code} key=${part} label=${part} title=${part === "prompt" ? "Prompt" : "Answer"} text=${found[part]} canWrap />
      ${found[`${part}Cut`] && html`<p class="faint">The ${part} is longer: this is its beginning.</p>`}`)}
    ${found && html`<details><summary>CLI</summary><${Code} label="Command of the content" text=${`weft explain ${requestId} --content`} /></details>`}</section>`;
}
