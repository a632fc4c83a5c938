// Models: the list of all of them, and one with all that can be done with it.
import { html } from "../parts/html.js";
import { collection, useLive } from "../live.js";
import { can } from "../session.js";
import { ModelDetail } from "./models_detail.js";
import { ModelList } from "./models_list.js";

/** @param {{name: string, query: URLSearchParams}} props */
export function Page({ name, query }) {
  useLive(...["model", ...(can("runners:view") ? ["runner"] : []), ...(name && can("telemetry:view") ? ["event"] : [])]);
  const models = collection("model").value;
  return name ? html`<${ModelDetail} key=${name} name=${name} models=${models} />` : html`<${ModelList} models=${models} query=${query} />`;
}
