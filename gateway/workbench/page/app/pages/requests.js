// Requests of the caller's tenant: those under way and the last that ended, and one of them with its timeline and receipt.
import { html, useMemo } from "../parts/html.js";
import { collection, useLive } from "../live.js";
import { address, go } from "../navigation.js";
import { ago, clock, count, seconds } from "../parts/format.js";
import { LiveNote } from "../parts/widgets.js";
import { Table } from "../parts/table.js";
import { Outcome, outcomeOf, tookOf, waitText } from "./requests_words.js";
import { RequestDetail } from "./requests_detail.js";

/** What the list may be limited to. @type {Record<string, {title: string, has: (request: any) => boolean}>} */
const SELECTIONS = {
  "": { title: "all", has: () => true },
  open: { title: "unfinished", has: (request) => request.state !== "ended" },
  ended: { title: "ended", has: (request) => request.state === "ended" },
  completed: { title: "completed", has: (request) => outcomeOf(request) === "completed" },
  failed: { title: "failed or refused", has: (request) => request.state === "ended" && !["completed", "cancelled"].includes(outcomeOf(request)) },
  cancelled: { title: "cancelled", has: (request) => outcomeOf(request) === "cancelled" },
};

/** @param {{name: string, query: URLSearchParams}} props */
export function Page({ name, query }) {
  useLive("request");
  const live = collection("request").value;
  return name ? html`<${RequestDetail} key=${name} id=${name} live=${live} />` : html`<${RequestList} live=${live} query=${query} />`;
}

/** @param {{live: import("../live.js").Collection, query: URLSearchParams}} props */
function RequestList({ live, query }) {
  const chosen = { state: query.get("state") ?? "", text: query.get("text") ?? "" };
  const rows = useMemo(() => {
    const { has } = SELECTIONS[chosen.state] ?? SELECTIONS[""];
    const wanted = chosen.text.toLowerCase();
    const found = [...live.items.values()].filter((request) => has(request) && (!wanted || textOf(request).includes(wanted)));
    return found.sort((left, right) => (left.arrivedAt < right.arrivedAt ? 1 : -1));
  }, [live, chosen.state, chosen.text]);
  const open = useMemo(() => [...live.items.values()].filter((request) => request.state !== "ended").length, [live]);
  /** @param {Record<string, string>} change */
  const set = (change) => go("requests", { ...chosen, ...change }, { replace: true });
  const isFiltered = chosen.state || chosen.text;
  return html`<h1>Requests</h1>
    <div class="row tools">
      <label class="inline">Show <select value=${chosen.state} onChange=${(/** @type {any} */ event) => set({ state: event.target.value })}>
        ${Object.entries(SELECTIONS).map(([value, { title }]) => html`<option key=${value} value=${value}>${title}</option>`)}</select></label>
      <label class="inline">Find <input type="search" value=${chosen.text} placeholder="id, model, client, runner" spellcheck=${false}
        onInput=${(/** @type {any} */ event) => set({ text: event.target.value })} /></label>
      <span class="fill"></span>
      ${live.isComplete && html`<span class="faint" role="status">${count(rows.length)} shown, ${count(open)} unfinished</span>`}
    </div>
    <${LiveNote} live=${live} />
    ${live.isComplete &&
    html`<${Table} label="Requests" rows=${rows} rowKey=${(/** @type {any} */ request) => request.requestId} columns=${COLUMNS} height="72vh"
      onOpen=${(/** @type {any} */ request) => go(`requests/${request.requestId}`)} empty=${isFiltered ? "No request matches the filter." : html`<${Empty} />`} />`}
    <p class="faint">Requests of your tenant: unfinished ones and the last 1,000 that ended.</p>`;
}

function Empty() {
  return html`No requests yet. Send one with <a href=${address("chat")}>Chat</a> or <code>weft chat MODEL -m "…"</code>.`;
}

/** What a search looks at. @param {any} request */
function textOf(request) {
  const attempts = request.receipt?.attempts ?? [];
  const runners = attempts.map((/** @type {any} */ attempt) => attempt.runner);
  return [request.requestId, request.target, request.askedModel, request.clientId, request.receipt?.model, ...runners].filter(Boolean).join(" ").toLowerCase();
}

/** @type {import("../parts/table.js").Column[]} */
const COLUMNS = [
  { title: "Request", cell: (request) => html`<a class="mono" href=${address(`requests/${request.requestId}`)}>${request.requestId}</a>` },
  { title: "State", cell: (request) => html`<${Outcome} request=${request} />`, sort: outcomeOf },
  { title: "Model", cell: (request) => request.askedModel || request.target, sort: (request) => request.askedModel || request.target },
  { title: "Arrived", cell: (request) => html`<span title=${ago(request.arrivedAt)}>${clock(request.arrivedAt)}</span>`, sort: (request) => request.arrivedAt },
  { title: "Took", cell: (request) => seconds(tookOf(request)), className: "number", sort: (request) => tookOf(request) ?? -1 },
  { title: "First token", cell: (request) => seconds(request.receipt?.timeToFirstTokenSeconds), className: "number", sort: (request) => request.receipt?.timeToFirstTokenSeconds ?? -1 },
  { title: "In", cell: (request) => count(request.receipt?.promptTokens), className: "number", sort: (request) => request.receipt?.promptTokens ?? -1, hint: "tokens of the prompt" },
  { title: "Out", cell: (request) => count(request.receipt?.completionTokens), className: "number", sort: (request) => request.receipt?.completionTokens ?? -1, hint: "tokens of the answer" },
  { title: "Client", cell: (request) => request.clientId ?? "", sort: (request) => request.clientId ?? "" },
  { title: "Reason", cell: (request) => waitText(request) || request.message || "", className: "wrap" },
];
