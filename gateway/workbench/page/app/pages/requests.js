// Requests: the list of running, waiting and ended ones, and one of them.
import { html } from "../parts/html.js";
import { collection, useLive } from "../live.js";
import { can } from "../session.js";
import { RequestDetail } from "./requests_detail.js";
import { RequestList } from "./requests_list.js";

/** @param {{name: string, query: URLSearchParams}} props */
export function Page({ name, query }) {
  useLive("request", ...(can("operations:view") && !name ? ["queue"] : []));
  const live = collection("request").value;
  return name ? html`<${RequestDetail} key=${name} id=${name} live=${live} />` : html`<${RequestList} live=${live} query=${query} />`;
}
