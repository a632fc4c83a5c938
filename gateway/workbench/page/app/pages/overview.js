// The overview: what the mesh does now, the last minutes, hour or day as small charts, its models, hosts and latest failures.
import { html, useEffect, useMemo, useState } from "../parts/html.js";
import { get } from "../api.js";
import { collection, useLive } from "../live.js";
import { address, go } from "../navigation.js";
import { can } from "../session.js";
import { bytes, count, figure, seconds } from "../parts/format.js";
import { LineChart, newest } from "../parts/line_chart.js";
import { ErrorNote, LiveNote } from "../parts/widgets.js";
import { Table } from "../parts/table.js";
import { lazy } from "../parts/lazy.js";
import { Failures } from "./overview_failures.js";
import { Hosts } from "./overview_hosts.js";
import { peakOf, rates, seriesOf, sumOf } from "./overview_figures.js";
import { memoryOf, memoryText, ModelState, stateOf } from "./models_view.js";

/** Of a mesh without models. */
const Catalog = lazy(async () => (await import("./models_catalog.js")).Catalog);
/** Rates are means of this time: few long answers end unevenly. */
const MEAN_SECONDS = 60;
const HOUR_SECONDS = 3600;
/** Seconds that may be shown. @type {Record<string, [string, string, number]>} */
const RANGES = { "": ["Last 15 minutes", "15 min", 900], "1h": ["Last hour", "1 h", HOUR_SECONDS], "24h": ["Last 24 hours", "24 h", 86_400] };
const DAY_MILLISECONDS_BETWEEN_READS = 60_000;

/** @param {{query: URLSearchParams}} props */
export function Page({ query }) {
  const seesFigures = can("telemetry:view");
  const seesRunners = can("runners:view");
  useLive("model", ...(can("operations:create") && can("operations:view") ? ["operation"] : []), ...(seesFigures ? ["figures"] : []), ...(seesRunners ? ["runner"] : []));
  const models = collection("model").value;
  if (models.isComplete && !models.items.size) {
    return html`<h1>Overview</h1><h2>This mesh has no models yet</h2>
      ${can("operations:create") ? html`<${Catalog} />` : html`<p class="faint empty">A key with operations:create can add one.</p>`}
      ${seesFigures && html`<${Figures} chosen="" range="" />`}`;
  }
  return html`<h1>Overview</h1>
    ${seesFigures && html`<${Figures} chosen=${query.get("model") ?? ""} range=${query.get("range") ?? ""} />`}
    <h2>Models</h2>
    <${LiveNote} live=${models} />
    ${models.isComplete && html`<${Models} items=${models.items} />`}
    ${seesRunners && html`<${Hosts} />`}
    ${can("inference:view") && html`<${Failures} />`}`;
}

/** @param {{chosen: string, range: string}} props */
function Figures({ chosen, range }) {
  const live = collection("figures").value;
  const [title, , length] = RANGES[range] ?? RANGES[""];
  const isDay = length > HOUR_SECONDS;
  const day = useDay(isDay);
  const recent = useMemo(() => seriesOf(live.items.values(), Math.min(length, HOUR_SECONDS)), [live, length]);
  const ofDay = useMemo(() => day.figures && seriesOf([day.figures], length), [day.figures, length]);
  const series = isDay ? ofDay : recent;
  const set = (/** @type {Record<string, string>} */ change) => go("", { model: chosen, range, ...change }, { replace: true });
  const choice = html`<label class="inline">Range <select value=${range} onChange=${(/** @type {any} */ event) => set({ range: event.target.value })}>
    ${Object.entries(RANGES).map(([value, [, name]]) => html`<option key=${value} value=${value}>${name}</option>`)}</select></label>`;
  if (!series || !recent) {
    const first = live.isComplete && !live.problem && (!isDay || day.figures);
    return html`<div class="hour"><${LiveNote} live=${live} /><${ErrorNote} error=${day.error} />
      ${first && html`<p class="faint" role="status">The first figures appear within ${recent ? "five minutes" : "ten seconds"}.</p>`}${isDay && choice}</div>`;
  }
  const of = (chosen && series.models.get(chosen)) || series.all;
  return html`<section aria-label=${title} class="hour">
    ${live.problem && html`<${LiveNote} live=${live} />`}<${ErrorNote} error=${day.error} />
    <${Tiles} series=${series} recent=${recent} of=${of} />
    <div class="row tools"><h2>${title}</h2><span class="fill"></span>
      ${choice}
      ${series.models.size > 0 &&
      html`<label class="inline">Model <select value=${series.models.has(chosen) ? chosen : ""} onChange=${(/** @type {any} */ event) => set({ model: event.target.value })}>
        <option value="">all models</option>${[...series.models.keys()].map((name) => html`<option key=${name} value=${name}>${name}</option>`)}</select></label>`}</div>
    <${Charts} series=${series} of=${of} />
  </section>`;
}

/** The figures of the last day, which are not live. @param {boolean} isShown */
function useDay(isShown) {
  const [found, setFound] = useState(/** @type {{figures: any, error: unknown}} */ ({ figures: null, error: null }));
  useEffect(() => {
    if (!isShown) return setFound({ figures: null, error: null });
    const stop = new AbortController();
    const read = () =>
      get("/v1/admin/figures", { day: true }, stop.signal).then(
        (figures) => setFound({ figures, error: null }),
        (error) => stop.signal.aborted || setFound((before) => ({ ...before, error })),
      );
    void read();
    const timer = setInterval(read, DAY_MILLISECONDS_BETWEEN_READS);
    return () => {
      clearInterval(timer);
      stop.abort();
    };
  }, [isShown]);
  return found;
}

/** `recent`: what the present is told of. @param {{series: import("./overview_figures.js").Series, recent: import("./overview_figures.js").Series, of: import("./overview_figures.js").RequestSeries}} props */
function Tiles({ series, recent, of }) {
  const { completed, failed, rejected, cancelled, retried, promptTokens, completionTokens } = of.counts;
  const ended = sumOf(completed) + sumOf(failed) + sumOf(rejected) + sumOf(cancelled);
  const wrong = sumOf(failed) + sumOf(rejected);
  const again = sumOf(retried);
  const told = [wrong ? `${count(wrong)} failed or refused` : "none failed", again && (again === 1 ? "1 retry" : `${count(again)} retries`)].filter(Boolean).join(", ");
  const first = of.times.timeToFirstTokenSeconds;
  return html`<dl class="tiles">
    <${Tile} name="Running" value=${recent.running.at(-1)} note=${`peak ${peakOf(series.running)}`} />
    <${Tile} name="Waiting" value=${recent.waiting.at(-1)} note=${`peak ${peakOf(series.waiting)}`} href=${can("inference:view") ? address("requests", { state: "waiting" }) : ""} />
    <${Tile} name="Requests" value=${count(ended)} note=${told} isBad=${wrong > 0} href=${can("inference:view") ? address("requests", wrong ? { state: "failed" } : {}) : ""} />
    <${Tile} name="Tokens out" value=${count(sumOf(completionTokens))} note=${`${count(sumOf(promptTokens))} in`} />
    <${Tile} name="First token" value=${newest(first.p50) === null ? "-" : seconds(newest(first.p50))} note=${newest(first.p95) === null ? "none yet" : `p95 ${seconds(newest(first.p95))}, last ${series.stepSeconds > 60 ? `${series.stepSeconds / 60} min` : `${series.stepSeconds} s`}`} />
  </dl>`;
}

/** @param {{name: string, value: any, note: string, isBad?: boolean, href?: string}} props */
function Tile({ name, value, note, isBad = false, href = "" }) {
  return html`<div class="panel tile"><dt>${href ? html`<a href=${href}>${name}</a>` : name}</dt>
    <dd>${value}</dd><dd class=${isBad ? "problem" : "faint"}>${note}</dd></div>`;
}

/** @param {{series: import("./overview_figures.js").Series, of: import("./overview_figures.js").RequestSeries}} props */
function Charts({ series, of }) {
  const { times, stepSeconds } = series;
  const width = Math.max(1, Math.round(MEAN_SECONDS / stepSeconds));
  const rate = (/** @type {string} */ name, factor = 1) => rates(of.counts[name], stepSeconds, width).map((value) => value && value * factor);
  const { timeToFirstTokenSeconds: first, timePerOutputTokenSeconds: each } = of.times;
  const percentiles = (/** @type {{p50: (number | null)[], p95: (number | null)[]}} */ { p50, p95 }) => [
    { name: "p50", tone: "blue", values: p50, isJoined: true },
    { name: "p95", tone: "busy", values: p95, isJoined: true },
  ];
  return html`<div class="grid charts">
    <${LineChart} title="Tokens per second" times=${times} format=${rateText} empty="no tokens" lines=${[
      { name: "out", tone: "accent", values: rate("completionTokens").map((ended, index) => of.speeds[index] ?? ended), isArea: true },
      { name: "in", tone: "blue", values: rate("promptTokens") },
    ]} />
    <${LineChart} title="Requests per minute" times=${times} format=${rateText} empty="no requests" lines=${[
      { name: "completed", tone: "accent", values: rate("completed", 60), isArea: true },
      { name: "failed", tone: "bad", values: rate("failed", 60) },
      { name: "refused", tone: "busy", values: rate("rejected", 60) },
      { name: "cancelled", tone: "blue", values: rate("cancelled", 60) },
    ]} />
    <${LineChart} title="Concurrent requests" times=${times} format=${count} least=${1} isWhole=${true} empty="none" lines=${[
      { name: "running", tone: "accent", values: series.running, isArea: true },
      { name: "waiting", tone: "busy", values: series.waiting },
    ]} />
    <${LineChart} title="Time to first token" times=${times} format=${seconds} lines=${percentiles(first)} empty="no answers" />
    <${LineChart} title="Time per token" times=${times} format=${seconds} lines=${percentiles(each)} empty="no answers" />
    ${[...series.devices].map(
      ([name, device]) => html`<${LineChart} key=${name} title=${`${name} · ${bytes(device.totalBytes)}`} times=${times} format=${percent} least=${1} empty="unknown" lines=${[
        { name: "memory", tone: "blue", values: device.usedBytes.map((used) => (used === null ? null : used / device.totalBytes)), isArea: true },
        { name: "computes", tone: "accent", values: device.utilization },
      ]} />`,
    )}
  </div>`;
}

/** @param {number} rate */
const rateText = (rate) => (rate ? figure(rate) : "0");

/** @param {number} share */
const percent = (share) => `${Math.round(100 * share)} %`;

/** @param {{items: Map<string, any>}} props */
function Models({ items }) {
  const rows = [...items.values()].sort((left, right) => left.name.localeCompare(right.name));
  const figures = collection("figures").value;
  const columns = useMemo(() => columnsOf(latestSpeeds(figures.items.values())), [figures]);
  return html`<${Table} label="Models" rows=${rows} rowKey=${(/** @type {any} */ row) => row.name} height="24rem" columns=${columns} />`;
}

/** Tokens per second of the running answers of a model. @param {any} row */
const speedOf = (row) => row.status?.instance?.tokensPerSecond;

/** Tokens per second of one answer, by the latest of the last hour. @param {Iterable<any>} figures @returns {(row: any) => number | undefined} */
function latestSpeeds(figures) {
  const models = seriesOf(figures, HOUR_SECONDS)?.models;
  return (row) => {
    const of = models?.get(row.name) ?? models?.get(row.status?.pool);
    const seconds = newest(of?.times.timePerOutputTokenSeconds.p50 ?? []);
    return seconds ? 1 / seconds : undefined;
  };
}

/** @param {(row: any) => number | undefined} latest @returns {import("../parts/table.js").Column[]} */
const columnsOf = (latest) => [
  { title: "Model", cell: (row) => html`<a href=${address(`models/${row.name}`)}>${row.name}</a>`, sort: (row) => row.name },
  { title: "State", cell: (row) => html`<${ModelState} model=${row} />`, sort: stateOf },
  { title: "Tokens/s", className: "number", cell: (row) => figure(speedOf(row)) || (latest(row) ? html`<span class="faint" title="of the latest answer">${figure(latest(row))}</span>` : "–"),
    sort: (row) => speedOf(row) ?? latest(row) ?? -1, hint: "of all running answers, over the last 10 s; idle: of the latest answer" },
  { title: "Memory", className: "number", cell: memoryText, sort: (row) => memoryOf(row).bytes, hint: "in use, or ~ estimated for a load" },
];
