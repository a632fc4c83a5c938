// A chart of usage: one bar for each hour or day, of requests, tokens or accelerator time.
import { html } from "../parts/html.js";
import { count, figure } from "../parts/format.js";

/** Requests of a row, however they ended. @param {any} row */
export const requests = (row) => row.completed + row.failed + row.cancelled + row.rejected + row.unknown;

/** What the bars may be of: its words, the whole, and the part of it that is drawn as bad.
 * @type {Record<string, {title: string, whole: (row: any) => number, bad?: (row: any) => number}>} */
const MEASURES = {
  requests: { title: "requests", whole: requests, bad: (row) => row.failed + row.rejected + row.unknown },
  in: { title: "tokens in", whole: (row) => row.promptTokens },
  out: { title: "tokens out", whole: (row) => row.completionTokens },
  megapixels: { title: "megapixels", whole: (row) => (row.imagePixels ?? 0) / 1e6 },
  audio: { title: "seconds of audio", whole: (row) => (row.audioMilliseconds ?? 0) / 1000 },
  gpu: { title: "GPU seconds", whole: (row) => row.gpuSeconds ?? 0 },
};

const MILLISECONDS = { hour: 3_600_000, day: 86_400_000 };
const MAX_BARS = 400;
const [WIDTH, HEIGHT, GAP] = [1000, 120, 0.2];

/**
 * @param {{items: any[], since?: string, until: string, unit: "hour" | "day", measure: string, onMeasure: (measure: string) => void}} props
 * Hours or days without a row are those in which nothing was used.
 */
export function UsageChart({ items, since, until, unit, measure, onMeasure }) {
  const { title, whole, bad } = MEASURES[measure] ?? MEASURES.requests;
  const bars = barsOf(items, since, until, unit);
  const most = Math.max(...bars.map((bar) => (bar.row ? whole(bar.row) : 0)), 0);
  const sum = items.reduce((total, row) => total + whole(row), 0);
  const step = WIDTH / bars.length;
  /** @param {number} value */
  const height = (value) => (most ? (value / most) * HEIGHT : 0);
  return html`<figure class="panel chart">
    <figcaption class="row"><span><strong>${text(sum)}</strong> ${title} <span class="faint">peak ${text(most)} per ${unit}</span></span>
      <label class="inline">Show <select value=${measure in MEASURES ? measure : "requests"} onChange=${(/** @type {any} */ event) => onMeasure(event.target.value)}>
        ${Object.entries(MEASURES).map(([name, each]) => html`<option key=${name} value=${name}>${each.title}</option>`)}</select></label></figcaption>
    <svg viewBox=${`0 0 ${WIDTH} ${HEIGHT}`} preserveAspectRatio="none" role="img" aria-label=${`${title} by ${unit}: ${text(sum)} in total, peak ${text(most)}`}>
      ${bars.map(({ start, row }, at) => {
        const value = row ? whole(row) : 0;
        const wrong = row && bad ? bad(row) : 0;
        const x = (at + GAP / 2) * step;
        return html`<g key=${start}><title>${`${label(start, unit)}: ${text(value)} ${title}${wrong ? `, ${text(wrong)} of them failed` : ""}`}</title>
          <rect class="ground" x=${at * step} y="0" width=${step} height=${HEIGHT} />
          ${value > 0 && html`<rect class="whole" x=${x} y=${HEIGHT - height(value)} width=${step * (1 - GAP)} height=${height(value)} />`}
          ${wrong > 0 && html`<rect class="bad" x=${x} y=${HEIGHT - height(wrong)} width=${step * (1 - GAP)} height=${height(wrong)} />`}</g>`;
      })}
    </svg>
    <div class="row faint ends"><span>${bars.length ? label(bars[0].start, unit) : ""}</span><span>${bars.length ? label(bars[bars.length - 1].start, unit) : ""}</span></div>
  </figure>`;
}

/** One bar for each hour or day of the time, the newest MAX_BARS of them.
 * @param {any[]} items @param {string | undefined} since @param {string} until @param {"hour" | "day"} unit */
function barsOf(items, since, until, unit) {
  const step = MILLISECONDS[unit];
  const rows = new Map(items.map((row) => [Date.parse(row.start), row]));
  const end = Math.ceil(Date.parse(until) / step) * step;
  const begin = Math.floor(Date.parse(since ?? items[0]?.start ?? until) / step) * step;
  const length = Math.min(MAX_BARS, Math.max(1, Math.round((end - begin) / step)));
  return Array.from({ length }, (_, at) => {
    const start = end - (length - at) * step;
    return { start, row: rows.get(start) };
  });
}

/** @param {number} value */
const text = (value) => (Number.isInteger(value) ? count(value) : figure(value));

/** @param {number} start @param {string} unit */
const label = (start, unit) => new Date(start).toISOString().slice(0, unit === "day" ? 10 : 16).replace("T", " ");
