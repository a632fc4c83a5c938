// A small chart of lines over time; with the pointer over it, its legend has the values of that time.
import { html, useState } from "./html.js";

const [WIDTH, HEIGHT] = [600, 110];

/** @typedef {{name: string, tone: string, values: (number | null)[], isArea?: boolean}} Line `null`: not known, a gap. */

/**
 * @param {{title: string, times: number[], lines: Line[], format: (value: number) => string, least?: number, empty?: string}} props
 * `times`: of the values, in milliseconds. `least`: the top of the chart is at least this.
 */
export function LineChart({ title, times, lines, format, least = 0, empty = "nothing in this time" }) {
  const [at, setAt] = useState(/** @type {number | null} */ (null));
  const known = lines.flatMap((line) => line.values.filter((value) => value !== null));
  const most = known.reduce((top, value) => Math.max(top, value), least);
  const shown = at === null ? null : Math.min(at, times.length - 1);
  /** @param {any} event */
  const follow = (event) => {
    const box = event.currentTarget.getBoundingClientRect();
    setAt(Math.round(((event.clientX - box.left) / box.width) * (times.length - 1)));
  };
  const told = lines.map((line) => `${line.name} ${valueText(newest(line.values), format)}`).join(", ");
  return html`<figure class="panel chart lines-chart">
    <figcaption><strong>${title}</strong>
      <ul class="legend">${lines.map(
        (line) => html`<li key=${line.name}><span class="swatch ${line.tone}"></span>${line.name}
          <span class="value">${valueText(shown === null ? newest(line.values) : line.values[shown], format)}</span></li>`,
      )}</ul></figcaption>
    <div class="plot" onPointerMove=${follow} onPointerLeave=${() => setAt(null)}>
      <span class="most faint">${most > 0 ? format(most) : ""}</span>
      <svg viewBox=${`0 0 ${WIDTH} ${HEIGHT}`} preserveAspectRatio="none" role="img" aria-label=${`${title}: ${known.length ? told : empty}`}>
        ${most > 0 && lines.map((line) => html`<${Shape} key=${line.name} line=${line} most=${most} />`)}
        ${shown !== null && html`<line class="cursor" x1=${place(shown, times.length)} x2=${place(shown, times.length)} y1="0" y2=${HEIGHT} />`}
      </svg>
      ${!known.some((value) => value > 0) && html`<span class="nothing faint">${empty}</span>`}
    </div>
    <div class="row faint ends"><span>${timeText(times[0])}</span><span>${shown === null ? "" : timeText(times[shown])}</span><span>${timeText(times[times.length - 1])}</span></div>
  </figure>`;
}

/** @param {{line: Line, most: number}} props */
function Shape({ line, most }) {
  const runs = runsOf(line.values);
  const points = (/** @type {[number, number][]} */ run) =>
    run.map(([index, value]) => `${place(index, line.values.length).toFixed(1)} ${(HEIGHT - (value / most) * (HEIGHT - 4) - 1).toFixed(1)}`);
  const path = runs.map((run) => `M${points(run).join("L")}`).join("");
  // A single point is a line of no length, which round ends make a dot.
  const dots = runs.filter((run) => run.length === 1).map((run) => `M${points(run)}h0`);
  const area = runs
    .map((run) => `M${place(run[0][0], line.values.length)} ${HEIGHT}L${points(run).join("L")}L${place(run[run.length - 1][0], line.values.length)} ${HEIGHT}Z`)
    .join("");
  return html`<g class=${line.tone}>${line.isArea && html`<path class="area" d=${area} />`}<path class="line" d=${path} />${dots.length > 0 && html`<path class="dots" d=${dots.join("")} />`}</g>`;
}

/** Values without gaps between them, with their places. @param {(number | null)[]} values */
function runsOf(values) {
  /** @type {[number, number][][]} */
  const runs = [];
  let isOpen = false;
  values.forEach((value, index) => {
    if (value !== null && isOpen) runs[runs.length - 1].push([index, value]);
    else if (value !== null) runs.push([[index, value]]);
    isOpen = value !== null;
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

/** @param {number | undefined} time */
const timeText = (time) => (time ? new Date(time).toLocaleTimeString([], { hour: "2-digit", minute: "2-digit", second: "2-digit" }) : "");
