// Models: the list of all of them, and one with all that can be done with it.
import { html } from "../parts/html.js";
import { collection, useLive } from "../live.js";
import { can } from "../session.js";
import { ModelDetail } from "./models_detail.js";
import { ModelList } from "./models_list.js";

/** The kinds that are watched, and the right that each needs. */
const KINDS = { model: "models:view", runner: "runners:view", operation: "operations:view", queue: "operations:view" };
const KINDS_OF_ONE = { ...KINDS, memory: "operations:view", event: "telemetry:view" };

/** @param {{name: string, query: URLSearchParams}} props */
export function Page({ name, query }) {
  useLive(...Object.entries(name ? KINDS_OF_ONE : KINDS).filter(([, right]) => can(right)).map(([kind]) => kind));
  const models = collection("model").value;
  return name ? html`<${ModelDetail} key=${name} name=${name} models=${models} />` : html`<${ModelList} models=${models} query=${query} />`;
}
