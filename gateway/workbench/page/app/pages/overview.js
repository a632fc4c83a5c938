// The overview: what the mesh does now, the last hour as small charts, and its models.
import { html, useMemo } from "../parts/html.js";
import { collection, useLive } from "../live.js";
import { address, go } from "../navigation.js";
import { can } from "../session.js";
import { bytes, count, figure, seconds } from "../parts/format.js";
import { LineChart, newest } from "../parts/line_chart.js";
import { LiveNote, State } from "../parts/widgets.js";
import { Table } from "../parts/table.js";
import { FirstRun } from "./first_run.js";
import { rates, seriesOf, sumOf } from "./overview_figures.js";

/** Rates are means of this time: few long answers end unevenly. */
const MEAN_SECONDS = 60;

/** @param {{query: URLSearchParams}} props */
export function Page({ query }) {
  const seesFigures = can("telemetry:view");
  useLive("model", ...(seesFigures ? ["figures"] : []));
  const models = collection("model").value;
  if (models.isComplete && !models.items.size) return html`<h1>Overview</h1><${FirstRun} />${seesFigures && html`<${Hour} chosen="" />`}`;
  return html`<h1>Overview</h1>
    ${seesFigures && html`<${Hour} chosen=${query.get("model") ?? ""} />`}
    <h2>Models</h2>
    <${LiveNote} live=${models} />
    ${models.isComplete && html`<${Models} items=${models.items} />`}`;
}

/** @param {{chosen: string}} props */
function Hour({ chosen }) {
  const live = collection("figures").value;
  const series = useMemo(() => seriesOf(live.items.values()), [live]);
  if (!series) {
    const first = live.isComplete && !live.problem;
    return html`<div class="hour"><${LiveNote} live=${live} />${first && html`<p class="faint" role="status">The first figures appear within ten seconds.</p>`}</div>`;
  }
  const of = (chosen && series.models.get(chosen)) || series.all;
  return html`<section aria-label="Last hour" class="hour">
    ${live.problem && html`<${LiveNote} live=${live} />`}
    <${Tiles} series=${series} of=${of} />
    <div class="row tools"><h2>Last hour</h2><span class="fill"></span>
      ${series.models.size > 0 &&
      html`<label class="inline">Model <select value=${series.models.has(chosen) ? chosen : ""} onChange=${(/** @type {any} */ event) => go("", { model: event.target.value }, { replace: true })}>
        <option value="">all models</option>${[...series.models.keys()].map((name) => html`<option key=${name} value=${name}>${name}</option>`)}</select></label>`}</div>
    <${Charts} series=${series} of=${of} />
  </section>`;
}

/** @param {{series: import("./overview_figures.js").Series, of: import("./overview_figures.js").RequestSeries}} props */
function Tiles({ series, of }) {
  const { completed, failed, rejected, cancelled, promptTokens, completionTokens } = of.counts;
  const ended = sumOf(completed) + sumOf(failed) + sumOf(rejected) + sumOf(cancelled);
  const wrong = sumOf(failed) + sumOf(rejected);
  const first = of.times.timeToFirstTokenSeconds;
  return html`<dl class="tiles">
    <${Tile} name="Running" value=${series.running[series.running.length - 1]} note=${`peak ${Math.max(...series.running)}`} />
    <${Tile} name="Waiting" value=${series.waiting[series.waiting.length - 1]} note=${`peak ${Math.max(...series.waiting)}`} href=${can("inference:view") ? address("requests", { state: "waiting" }) : ""} />
    <${Tile} name="Requests" value=${count(ended)} note=${wrong ? `${count(wrong)} failed or refused` : "none failed"} isBad=${wrong > 0} href=${can("inference:view") ? address("requests") : ""} />
    <${Tile} name="Tokens out" value=${count(sumOf(completionTokens))} note=${`${count(sumOf(promptTokens))} in`} />
    <${Tile} name="First token" value=${newest(first.p50) === null ? "-" : seconds(newest(first.p50))} note=${newest(first.p95) === null ? "none yet" : `p95 ${seconds(newest(first.p95))}, last 10 s`} />
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
  const rate = (/** @type {string} */ name, factor = 1) => rates(of.counts[name], stepSeconds, width).map((value) => value * factor);
  const { timeToFirstTokenSeconds: first, timePerOutputTokenSeconds: each } = of.times;
  const percentiles = (/** @type {{p50: (number | null)[], p95: (number | null)[]}} */ { p50, p95 }) => [
    { name: "p50", tone: "accent", values: p50 },
    { name: "p95", tone: "busy", values: p95 },
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
    <${LineChart} title="Concurrent requests" times=${times} format=${count} least=${1} empty="none" lines=${[
      { name: "running", tone: "accent", values: series.running, isArea: true },
      { name: "waiting", tone: "busy", values: series.waiting },
    ]} />
    <${LineChart} title="Time to first token" times=${times} format=${seconds} lines=${percentiles(first)} empty="no answers" />
    <${LineChart} title="Time per token" times=${times} format=${seconds} lines=${percentiles(each)} empty="no answers" />
    ${[...series.devices].map(
      ([name, device]) => html`<${LineChart} key=${name} title=${`${name} · ${bytes(device.totalBytes)}`} times=${times} format=${percent} least=${1} empty="nothing is known" lines=${[
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
  return html`<${Table} label="Models" rows=${rows} rowKey=${(/** @type {any} */ row) => row.name} height="24rem"
    columns=${[
      { title: "Model", cell: (/** @type {any} */ row) => row.name, sort: (/** @type {any} */ row) => row.name },
      { title: "State", cell: (/** @type {any} */ row) => html`<${State} value=${row.status?.state} />`, sort: (/** @type {any} */ row) => row.status?.state ?? "" },
    ]} />`;
}
