// A small chart of lines over time with its axes; with the pointer over it, its legend has the values of that time.
import { html, useState } from "./html.js";

const [WIDTH, HEIGHT] = [600, 110];
/** Times that are written under a chart. */
const TIME_TICKS = 4;
const NICE = [1, 2, 2.5, 5, 10];
/** Half the length of the line that a single value is. */
const SINGLE = 4;

/** @typedef {{name: string, tone: string, values: (number | null)[], isArea?: boolean, isJoined?: boolean}} Line
 * `null`: not known, a gap, which the line of one that `isJoined` crosses. */

/**
 * @param {{title: string, times: number[], lines: Line[], format: (value: number) => string, least?: number, isWhole?: boolean, empty?: string}} props
 * `times`: of the values, in milliseconds. `least`: the top of the chart is at least this. `isWhole`: its values are whole numbers.
 */
export function LineChart({ title, times, lines, format, least = 0, isWhole = false, empty = "no data" }) {
  const [at, setAt] = useState(/** @type {number | null} */ (null));
  const known = lines.flatMap((line) => line.values.filter((value) => value !== null));
  const most = topOf(known.reduce((top, value) => Math.max(top, value), least), isWhole);
  const shown = at === null ? null : Math.min(at, times.length - 1);
  /** @param {any} event */
  const follow = (event) => {
    const box = event.currentTarget.getBoundingClientRect();
    setAt(Math.round(((event.clientX - box.left) / box.width) * (times.length - 1)));
  };
  const told = lines.map((line) => `${line.name} ${valueText(newest(line.values), format)}`).join(", ");
  return html`<figure class="panel chart lines-chart">
    <figcaption><strong>${title}</strong>${shown !== null && html` <span class="faint">${timeText(times[shown], true)}</span>`}
      <ul class="legend">${lines.map(
        (line) => html`<li key=${line.name}><span class="swatch ${line.tone}"></span>${line.name}
          <span class="value">${valueText(shown === null ? newest(line.values) : line.values[shown], format)}</span></li>`,
      )}</ul></figcaption>
    <div class="axes">
      <div class="scale faint" aria-hidden="true">${most > 0 && [most, most / 2, 0].map((value) => html`<span key=${value}>${value ? format(value) : "0"}</span>`)}</div>
      <div class="plot" onPointerMove=${follow} onPointerLeave=${() => setAt(null)}>
        <svg viewBox=${`0 0 ${WIDTH} ${HEIGHT}`} preserveAspectRatio="none" role="img" aria-label=${`${title}: ${known.length ? told : empty}`}>
          ${[0, HEIGHT / 2, HEIGHT].map((y) => html`<line key=${y} class="grid-line" x1="0" x2=${WIDTH} y1=${y} y2=${y} />`)}
          ${most > 0 && lines.map((line) => html`<${Shape} key=${line.name} line=${line} most=${most} />`)}
          ${shown !== null && html`<line class="cursor" x1=${place(shown, times.length)} x2=${place(shown, times.length)} y1="0" y2=${HEIGHT} />`}
        </svg>
        ${!known.some((value) => value > 0) && html`<span class="nothing faint">${empty}</span>`}
      </div>
      <div class="times faint" aria-hidden="true">${Array.from({ length: TIME_TICKS }, (_, tick) =>
        html`<span key=${tick}>${timeText(times[Math.round((tick * (times.length - 1)) / (TIME_TICKS - 1))])}</span>`)}</div>
    </div>
  </figure>`;
}

/** A round number for the top of a scale, whose half is round too. @param {number} most @param {boolean} isWhole */
function topOf(most, isWhole) {
  if (most <= 0) return 0;
  const unit = 10 ** Math.floor(Math.log10(most));
  const top = /** @type {number} */ (NICE.find((factor) => factor * unit >= most)) * unit;
  return isWhole ? 2 * Math.ceil(top / 2) : top;
}

/** @param {{line: Line, most: number}} props */
function Shape({ line, most }) {
  const runs = runsOf(line.values, line.isJoined);
  const points = (/** @type {[number, number][]} */ run) =>
    run.map(([index, value]) => `${place(index, line.values.length).toFixed(1)} ${(HEIGHT - (value / most) * HEIGHT).toFixed(1)}`);
  const path = runs.map((run) => (run.length > 1 ? `M${points(run).join("L")}` : `M${points(run)}m-${SINGLE} 0h${2 * SINGLE}`)).join("");
  const area = runs
    .map((run) => `M${place(run[0][0], line.values.length)} ${HEIGHT}L${points(run).join("L")}L${place(run[run.length - 1][0], line.values.length)} ${HEIGHT}Z`)
    .join("");
  return html`<g class=${line.tone}>${line.isArea && html`<path class="area" d=${area} />`}<path class="line" d=${path} /></g>`;
}

/** Values without gaps between them, with their places. @param {(number | null)[]} values @param {boolean} [isJoined] all in one */
function runsOf(values, isJoined = false) {
  /** @type {[number, number][][]} */
  const runs = [];
  let isOpen = false;
  values.forEach((value, index) => {
    if (value !== null && isOpen) runs[runs.length - 1].push([index, value]);
    else if (value !== null) runs.push([[index, value]]);
    isOpen = value !== null || (isJoined && isOpen);
  });
  return runs;
}

/** @param {number} index @param {number} count */
const place = (index, count) => (count > 1 ? (index / (count - 1)) * WIDTH : WIDTH);

/** @param {(number | null)[]} values */
export function newest(values) {
  for (let index = values.length - 1; index >= 0; index -= 1) if (values[index] !== null) return values[index];
  return null;
}

/** @param {number | null | undefined} value @param {(value: number) => string} format */
const valueText = (value, format) => (value === null || value === undefined ? "-" : format(value));

/** @param {number} time @param {boolean} [hasSeconds] */
const timeText = (time, hasSeconds = false) =>
  new Date(time).toLocaleTimeString([], { hour: "2-digit", minute: "2-digit", ...(hasSeconds && { second: "2-digit" }) });
