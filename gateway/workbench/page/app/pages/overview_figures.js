// The figures of the last hour or a part of it as series, on one axis of time.

const COUNTS = ["completed", "failed", "rejected", "cancelled", "retried", "promptTokens", "cachedPromptTokens", "completionTokens"];
const TIMES = ["timeToFirstTokenSeconds", "timePerOutputTokenSeconds"];

/**
 * @typedef {{counts: Record<string, (number | null)[]>, speeds: (number | null)[], times: Record<string, {p50: (number | null)[], p95: (number | null)[]}>}} RequestSeries
 * @typedef {{name: string, totalBytes: number, usedBytes: (number | null)[], utilization: (number | null)[]}} DeviceSeries
 * @typedef {{stepSeconds: number, times: number[], waiting: (number | null)[], running: (number | null)[], all: RequestSeries,
 *   models: Map<string, RequestSeries>, devices: Map<string, DeviceSeries>}} Series `null`: unknown, as before the first step.
 */

/** One axis over the last seconds of documents of figures; null: there is none, or no step has ended.
 * @param {Iterable<any>} documents @param {number} seconds @returns {Series | null} */
export function seriesOf(documents, seconds) {
  const given = [...documents].filter((document) => document.stepCount).sort((left, right) => Date.parse(left.start) - Date.parse(right.start));
  if (!given.length) return null;
  const step = given[0].stepSeconds * 1000;
  const last = given.reduce((end, document) => Math.max(end, Date.parse(document.start) + document.stepCount * step), 0);
  const count = Math.round((1000 * seconds) / step);
  const first = last - count * step;
  /** @type {Series} */
  const series = {
    stepSeconds: step / 1000,
    times: Array.from({ length: count }, (_, index) => first + (index + 1) * step),
    waiting: gaps(count),
    running: gaps(count),
    all: requestSeries(count),
    models: new Map(),
    devices: new Map(),
  };
  for (const document of given) {
    const from = Math.round((Date.parse(document.start) - first) / step);
    put(series.waiting, document.waiting, from);
    put(series.running, document.running, from);
    putRequests(series.all, document.all, from);
    for (const model of document.models) {
      if (!series.models.has(model.model)) series.models.set(model.model, requestSeries(count));
      putRequests(/** @type {RequestSeries} */ (series.models.get(model.model)), model, from);
    }
    for (const device of document.devices) putDevice(series.devices, device, from, count);
  }
  return series;
}

/** @param {number} count @returns {(number | null)[]} */
const gaps = (count) => Array.from({ length: count }, () => null);

/** @param {number} count @returns {RequestSeries} */
function requestSeries(count) {
  return {
    counts: Object.fromEntries(COUNTS.map((name) => [name, gaps(count)])),
    speeds: gaps(count),
    times: Object.fromEntries(TIMES.map((name) => [name, { p50: gaps(count), p95: gaps(count) }])),
  };
}

/** @param {RequestSeries} series @param {any} given @param {number} from */
function putRequests(series, given, from) {
  // 64-bit counts are text.
  for (const name of COUNTS) put(series.counts[name], given[name].map(Number), from);
  put(series.speeds, given.tokensPerSecond, from);
  for (const name of TIMES) {
    put(series.times[name].p50, given[name].p50, from);
    put(series.times[name].p95, given[name].p95, from);
  }
}

/** @param {Map<string, DeviceSeries>} devices @param {any} given @param {number} from @param {number} count */
function putDevice(devices, given, from, count) {
  const name = `${given.host} · device ${given.index}`;
  const known = devices.get(name) ?? { name: given.name, totalBytes: Number(given.totalBytes), usedBytes: gaps(count), utilization: gaps(count) };
  devices.set(name, known);
  put(known.usedBytes, given.usedBytes, from);
  put(known.utilization, given.utilization, from);
}

/** Puts values at a place; what lies before the axis is left out. @param {any[]} target @param {any[]} values @param {number} from */
function put(target, values, from) {
  values.forEach((value, index) => {
    if (from + index >= 0 && from + index < target.length) target[from + index] = value;
  });
}

/** The mean rate over the last `width` known steps at each step, per second. @param {(number | null)[]} counts @param {number} stepSeconds @param {number} width */
export function rates(counts, stepSeconds, width) {
  return counts.map((count, index) => {
    if (count === null) return null;
    const known = counts.slice(Math.max(0, index + 1 - width), index + 1).filter((each) => each !== null);
    return sumOf(known) / (stepSeconds * known.length);
  });
}

/** @param {(number | null)[]} values */
export const sumOf = (values) => values.reduce((/** @type {number} */ sum, value) => sum + (value ?? 0), 0);

/** @param {(number | null)[]} values */
export const peakOf = (values) => values.reduce((/** @type {number} */ most, value) => Math.max(most, value ?? 0), 0);
