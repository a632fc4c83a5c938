// The latest failed and refused requests, each with its reason.
import { html, useEffect, useState } from "../parts/html.js";
import { get } from "../api.js";
import { comebacks } from "../live.js";
import { address } from "../navigation.js";
import { ago, clock, words } from "../parts/format.js";
import { ErrorNote } from "../parts/widgets.js";

const SHOWN = 5;
const REFRESH_MILLISECONDS = 10_000;

/** The list, asked for again every ten seconds. */
function useFailures() {
  const [found, setFound] = useState(/** @type {{items: any[] | null, error: unknown}} */ ({ items: null, error: null }));
  useEffect(() => {
    const stop = new AbortController();
    const read = () =>
      get("/v1/requests", { state: "failed", limit: SHOWN, allTenants: true }, stop.signal).then(
        ({ items }) => setFound({ items, error: null }),
        (error) => stop.signal.aborted || setFound((before) => ({ ...before, error })),
      );
    void read();
    const timer = setInterval(read, REFRESH_MILLISECONDS);
    return () => {
      clearInterval(timer);
      stop.abort();
    };
  }, [comebacks.value]);
  return found;
}

export function Failures() {
  const { items, error } = useFailures();
  return html`<section class="failures"><div class="row"><h2>Recent failures</h2><a href=${address("requests", { state: "failed" })}>All</a></div>
    ${items ? "" : html`<${ErrorNote} error=${error} />`}
    ${items && !items.length && html`<p class="faint">No failed or refused requests.</p>`}
    ${items && items.length > 0 && html`<ul aria-label="Recent failures">${items.map(
      ({ requestId, askedModel, target, reason, message, endedAt }) => html`<li key=${requestId}>
        <a href=${address(`requests/${requestId}`)}>${askedModel || target}</a> <span class="state bad">${words(reason)}</span>
        <span class="faint" title=${clock(endedAt)}>${ago(endedAt)}</span><p>${message}</p></li>`,
    )}</ul>`}</section>`;
}
