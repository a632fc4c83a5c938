// What tenants, keys and models used: sums, a chart by hour or day, and rows to save as CSV.
import { html, useEffect, useState } from "../parts/html.js";
import { ApiError, get } from "../api.js";
import { go } from "../navigation.js";
import { caller, can } from "../session.js";
import { count, dollars, figure } from "../parts/format.js";
import { CommittedText, DateField } from "../parts/fields.js";
import { attempt } from "../parts/notices.js";
import { Table } from "../parts/table.js";
import { Code, ErrorNote } from "../parts/widgets.js";
import { saveText } from "../transfer.js";
import { requests, UsageChart } from "./usage_chart.js";
import { csvText } from "./usage_csv.js";

const MAX_ROWS = 10_000;
/** While the gateway is away. */
const RETRY_MILLISECONDS = 2000;
/** @type {[string, string][]} */
const SPANS = [
  ["24h", "24 hours"],
  ["7d", "7 days"],
  ["30d", "30 days"],
  ["90d", "90 days"],
];
/** @type {[string, string][]} */
const GROUPS = [
  ["tenant", "tenant"],
  ["key", "key"],
  ["model", "model"],
  ["asked", "name asked for"],
  ["program", "coding agent"],
  ["agent", "main or sub-agent"],
  ["purpose", "purpose"],
  ["hour", "hour"],
  ["day", "day"],
];

/** @param {{query: URLSearchParams}} props */
export function Page({ query }) {
  const seesAll = can("telemetry:view");
  const chosen = {
    by: query.get("by") ?? (seesAll ? "tenant,model" : "model"),
    since: query.get("since") ?? "7d",
    until: query.get("until") ?? "",
    tenant: query.get("tenant") ?? "",
    model: query.get("model") ?? "",
    compareWith: query.get("compareWith") ?? "",
    measure: query.get("measure") ?? "requests",
    whose: query.get("whose") ?? (seesAll ? "all" : "own"),
  };
  const path = chosen.whose === "all" && seesAll ? "/v1/admin/usage" : "/v1/usage";
  const asked = { since: chosen.since, until: chosen.until, model: chosen.model, compareWith: chosen.compareWith, tenant: path === "/v1/usage" ? "" : chosen.tenant };
  const rows = useAnswer(path, { ...asked, by: chosen.by, limit: MAX_ROWS });
  const unit = isShort(chosen.since) ? "hour" : "day";
  const times = useAnswer(path, { ...asked, by: unit, limit: MAX_ROWS });
  /** @param {Record<string, string>} change */
  const set = (change) => go("usage", { ...chosen, ...change }, { replace: true });
  return html`<h1>Usage</h1>
    <${Choices} chosen=${chosen} set=${set} seesAll=${seesAll} isAll=${path !== "/v1/usage"} />
    <${ErrorNote} error=${rows.error ?? times.error} />
    ${times.found && html`<${UsageChart} items=${times.found.items} since=${times.found.since} until=${times.found.until} unit=${unit} measure=${chosen.measure} onMeasure=${(/** @type {string} */ measure) => set({ measure })} />`}
    ${rows.found && html`<${Rows} found=${rows.found} by=${chosen.by} />`}
    <details><summary>CLI</summary><${Code} label="Command" text=${command(chosen)} /></details>`;
}

/** @param {{chosen: Record<string, string>, set: (change: Record<string, string>) => void, seesAll: boolean, isAll: boolean}} props */
function Choices({ chosen, set, seesAll, isAll }) {
  const by = chosen.by.split(",").filter(Boolean);
  /** Of hour and day the last one that was chosen counts. @param {string} group @param {boolean} isOn */
  const toggle = (group, isOn) => {
    const others = by.filter((each) => each !== group && !(isOn && isTime(group) && isTime(each)));
    set({ by: GROUPS.map(([name]) => name).filter((name) => others.includes(name) || (isOn && name === group)).join(",") || "tenant" });
  };
  const on = (/** @type {string} */ name) => (/** @type {any} */ event) => set({ [name]: event.target.value.trim() });
  const spans = SPANS.some(([value]) => value === chosen.since) ? SPANS : [...SPANS, [chosen.since, chosen.since]];
  return html`<div class="row tools">
      ${seesAll &&
      html`<label class="inline">Tenant <select value=${chosen.whose} onChange=${on("whose")}><option value="all">all tenants</option>
        <option value="own">${caller.value?.tenant || "my tenant"}</option></select></label>`}
      <label class="inline">Last <select value=${chosen.since} onChange=${on("since")}>${spans.map(([value, words]) => html`<option key=${value} value=${value}>${words}</option>`)}</select></label>
      <${DateField} label="Until" value=${chosen.until} onCommit=${(/** @type {string} */ until) => set({ until })} />
      ${isAll && html`<${CommittedText} label="Tenant" value=${chosen.tenant} onCommit=${(/** @type {string} */ tenant) => set({ tenant })} />`}
      <${CommittedText} label="Model" value=${chosen.model} onCommit=${(/** @type {string} */ model) => set({ model })} />
      <${CommittedText} label="Compare with" value=${chosen.compareWith} placeholder="the cheapest" onCommit=${(/** @type {string} */ compareWith) => set({ compareWith })} />
    </div>
    <fieldset class="row tools"><legend>Rows by</legend>
      ${GROUPS.filter(([name]) => isAll || name !== "tenant").map(
        ([name, words]) => html`<label key=${name} class="inline"><input type="checkbox" checked=${by.includes(name)}
          onChange=${(/** @type {any} */ event) => toggle(name, event.target.checked)} /> ${words}</label>`,
      )}</fieldset>`;
}

/** @param {{found: any, by: string}} props */
function Rows({ found, by }) {
  const groups = by.split(",");
  const name = `usage-${groups.join("-")}.csv`;
  const rows = found.items.map((/** @type {any} */ row, /** @type {number} */ at) => ({ ...row, at: String(at) }));
  if (rows.length > 1) rows.push({ ...found.total, savedNanodollars: found.savedNanodollars, at: "total", isTotal: true });
  return html`<div class="row tools"><h2>By ${GROUPS.filter(([group]) => groups.includes(group)).map(([, words]) => words).join(", ")}</h2>
      <button disabled=${!found.items.length} onClick=${() => attempt(async () => saveText(csvText(found.items, groups), name, "text/csv"))}>Save as CSV</button></div>
    ${found.hasMore && html`<p class="problem" role="status">There are more than ${count(MAX_ROWS)} rows: choose a shorter time, a tenant or a model. The total counts all.</p>`}
    <${Table} label="Usage" rows=${rows} rowKey=${(/** @type {any} */ row) => row.at} columns=${columnsOf(groups, rows)} empty="No usage in this time." />
    <p class="faint">Whole hours in UTC. Unknown values are counted as unknown, not as zero.${found.comparedWith ? ` Saved: what the tokens that were not sent to a provider would have cost at ${found.comparedWith}.` : ""}</p>`;
}

/** @param {string[]} groups @param {any[]} rows @returns {import("../parts/table.js").Column[]} */
function columnsOf(groups, rows) {
  const names = GROUPS.filter(([group]) => groups.includes(group) && !isTime(group));
  const time = groups.find(isTime);
  const keys = [...(time ? [{ title: `${time} (UTC)`, text: (/** @type {any} */ row) => timeText(row.start, time) }] : []), ...names.map(([group, words]) => ({ title: words, text: (/** @type {any} */ row) => row[group] || "-" }))];
  return [
    ...keys.map(({ title, text }, at) => ({ title, cell: (/** @type {any} */ row) => (row.isTotal ? (at ? "" : html`<strong>total</strong>`) : text(row)) })),
    number("requests", requests),
    number("completed", (row) => row.completed),
    number("failed", (row) => row.failed),
    number("cancelled", (row) => row.cancelled),
    number("rejected", (row) => row.rejected),
    number("in", (row) => row.promptTokens, "tokens of prompts"),
    number("cached", (row) => row.cachedPromptTokens, "prompt tokens from a prefix cache"),
    number("out", (row) => row.completionTokens, "generated tokens"),
    ...mediaColumns(rows),
    { title: "GPU seconds", className: "number", cell: gpu, hint: "time that accelerators computed" },
    { title: "Wh", className: "number", cell: wattHours, hint: "accelerator energy, if measured" },
    number("remote", (row) => row.remote, "requests sent to a remote provider"),
    ...moneyColumn(rows, "cost", "priceNanodollars", "price of remote requests, if known"),
    ...moneyColumn(rows, "saved", "savedNanodollars", "price of the other requests' tokens at the model that is compared with"),
  ];
}

/** @param {string} title @param {(row: any) => number} of @param {string} [hint] */
const number = (title, of, hint) => ({ title, className: "number", hint, cell: (/** @type {any} */ row) => html`<span title=${of(row)}>${count(of(row))}</span>` });

/** A column of money, where there is any. @param {any[]} rows @param {string} title @param {string} name @param {string} hint */
const moneyColumn = (rows, title, name, hint) =>
  rows.some((row) => row[name] !== undefined) ? [{ title, className: "number", hint, cell: (/** @type {any} */ row) => dollars(row[name]) || "-" }] : [];

/** The columns of pictures and recordings, where there are any. @param {any[]} rows */
function mediaColumns(rows) {
  const some = (/** @type {string} */ name) => rows.some((row) => row[name] > 0);
  return [
    ...(some("imageSteps") ? [number("steps", (row) => row.imageSteps ?? 0, "steps of denoising, over all pictures")] : []),
    ...(some("imagePixels") ? [measured("megapixels", (row) => (row.imagePixels ?? 0) / 1e6, "of the pictures that were made")] : []),
    ...(some("audioMilliseconds") ? [measured("audio seconds", (row) => (row.audioMilliseconds ?? 0) / 1000, "of the recordings that were heard or spoken")] : []),
  ];
}

/** @param {string} title @param {(row: any) => number} of @param {string} hint */
const measured = (title, of, hint) => ({ title, className: "number", hint, cell: (/** @type {any} */ row) => figure(of(row)) });

/** @param {any} row */
function gpu({ gpuSeconds, unknownGpu }) {
  const known = gpuSeconds === undefined ? "-" : figure(gpuSeconds);
  return unknownGpu ? `${known} (+${count(unknownGpu)} unknown)` : known;
}

/** @param {any} row */
const wattHours = ({ energyMillijoules }) => (energyMillijoules === undefined ? "-" : figure(energyMillijoules / 3_600_000));

/** @param {string} group */
const isTime = (group) => group === "hour" || group === "day";
/** Whether a span is read by its hours. @param {string} since */
const isShort = (since) => /^\d+[mh]$/.test(since);
/** @param {string | undefined} start @param {string} unit */
const timeText = (start, unit) => (start ?? "").slice(0, unit === "day" ? 10 : 16).replace("T", " ");

/** @param {Record<string, string>} chosen */
function command({ by, since, until, tenant, model, compareWith }) {
  const options = Object.entries({ by, since, until, tenant, model, "compare-with": compareWith }).filter(([, value]) => value);
  return ["weft mesh usage", ...options.map(([name, value]) => `--${name} ${/^[\w.,:-]+$/.test(value) ? value : `'${value.replaceAll("'", "'\\''")}'`}`)].join(" ");
}

/** The answer to a question, asked again where it changes. What was found stays until then.
 * @param {string} path @param {Record<string, string | number>} query */
function useAnswer(path, query) {
  const [answer, setAnswer] = useState(/** @type {{found: any, error: unknown}} */ ({ found: null, error: null }));
  const [turn, setTurn] = useState(0);
  const isAway = answer.error instanceof ApiError && answer.error.status === 0;
  const key = path + JSON.stringify(query);
  useEffect(() => {
    const stop = new AbortController();
    get(path, query, stop.signal).then(
      (found) => setAnswer({ found, error: null }),
      (error) => stop.signal.aborted || setAnswer({ found: null, error }),
    );
    return () => stop.abort();
  }, [key, turn]);
  useEffect(() => {
    if (!isAway) return undefined;
    const timer = setTimeout(() => setTurn(turn + 1), RETRY_MILLISECONDS);
    return () => clearTimeout(timer);
  }, [isAway, turn, answer]);
  return answer;
}

