// Trials: the list, what one has found so far, and its pairs, which a person judges.
import { html, useEffect, useState } from "weft/parts/html.js";
import { get, segment } from "weft/api.js";
import { collection, comebacks, useLive } from "weft/live.js";
import { address, go } from "weft/navigation.js";
import { Table } from "weft/parts/table.js";
import { ErrorNote, LiveNote } from "weft/parts/widgets.js";
import { Pair, unjudged } from "./trials_pair.js";
import { Report, TrialState } from "./trials_report.js";

const REPORT_MILLISECONDS = 10_000;

/** @param {{name: string, query: URLSearchParams}} props */
export function Page({ name, query }) {
  useLive("trial", ...(name ? ["alias"] : []));
  const live = collection("trial").value;
  return name ? html`<${Trial} key=${name} name=${name} task=${query.get("pair") ?? ""} manifest=${live.items.get(name)} />` : html`<${List} live=${live} />`;
}

/** @param {{live: import("weft/live.js").Collection}} props */
function List({ live }) {
  const [reports, setReports] = useState(/** @type {Record<string, any>} */ ({}));
  const names = [...live.items.keys()].sort();
  useEffect(() => {
    const stop = new AbortController();
    for (const name of names) {
      const put = (/** @type {any} */ report) => stop.signal.aborted || setReports((old) => ({ ...old, [name]: report }));
      get(`/v1/trials/${segment(name)}`, {}, stop.signal).then(put, (error) => put({ error }));
    }
    return () => stop.abort();
  }, [names.join("\n"), comebacks.value]);
  const rows = names.map((name) => ({ ...live.items.get(name), report: reports[name] }));
  return html`<h1>Trials</h1>
    <p class="faint">A trial sends a share of one tenant's answered requests to another model as well, in idle capacity. You judge the two answers without knowing which model wrote which.</p>
    <${LiveNote} live=${live} />
    ${live.isComplete &&
    html`<${Table} label="Trials" rows=${rows} rowKey=${(/** @type {any} */ row) => row.name} columns=${COLUMNS} onOpen=${(/** @type {any} */ row) => go(`trials/${row.name}`)}
      empty=${html`No trials. Start one: <code>weft models trial start NEW --against OLD --share 10%</code>`} />`}`;
}

/** @type {import("weft/parts/table.js").Column[]} */
const COLUMNS = [
  { title: "Trial", cell: (row) => html`<a href=${address(`trials/${row.name}`)}>${row.name}</a>`, sort: (row) => row.name },
  { title: "Candidate", cell: (row) => row.candidate, sort: (row) => row.candidate },
  { title: "Against", cell: (row) => row.against, sort: (row) => row.against },
  { title: "Tenant", cell: (row) => row.tenant, sort: (row) => row.tenant },
  { title: "Share", cell: (row) => `${row.sharePercent} %`, className: "number", sort: (row) => row.sharePercent },
  { title: "Pairs", cell: ({ report, maxPairs }) => (report?.pairs ? `${report.pairs.length} of ${maxPairs || 100}` : "–"), className: "number" },
  { title: "To judge", cell: ({ report }) => (report?.pairs ? unjudged(report).length : "–"), className: "number" },
  { title: "State", cell: ({ report }) => (report?.error ? report.error.message : report && html`<${TrialState} report=${report} />`), className: "wrap" },
];

/** @param {{name: string, task: string, manifest: any}} props `task`: the pair that is shown; empty: the report. */
function Trial({ name, task, manifest }) {
  const [found, setFound] = useState(/** @type {{report: any, error: unknown}} */ ({ report: null, error: null }));
  const isJudging = Boolean(task);
  useEffect(() => {
    const stop = new AbortController();
    const read = () => get(`/v1/trials/${segment(name)}`, {}, stop.signal).then(
      (report) => setFound({ report, error: null }),
      (error) => stop.signal.aborted || setFound((old) => ({ ...old, error })),
    );
    void read();
    // A report that is read again during judging could be older than the last verdict.
    const timer = isJudging ? 0 : setInterval(() => document.hidden || read(), REPORT_MILLISECONDS);
    return () => {
      clearInterval(timer);
      stop.abort();
    };
  }, [name, isJudging, comebacks.value]);
  const { report, error } = found;
  /** @param {string} judged @param {string} verdict */
  const onJudged = (judged, verdict) => {
    const pairs = report.pairs.map((/** @type {any} */ pair) => (pair.task === judged ? { ...pair, verdict } : pair));
    setFound({ report: { ...report, pairs }, error: null });
  };
  return html`<p class="back"><a href=${address("trials")}>Trials</a>${isJudging && html` / <a href=${address(`trials/${name}`)}>${name}</a>`}</p>
    ${!report && html`<h1>${name}</h1>${!error && html`<div class="skeleton" role="status" aria-label="Loading"></div>`}`}
    <${ErrorNote} error=${error} />
    ${report && (isJudging ? html`<${Pair} report=${report} task=${task} onJudged=${onJudged} />` : html`<${Report} report=${report} manifest=${manifest} />`)}`;
}
