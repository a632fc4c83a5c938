// A table of many rows: only those in sight are drawn, so 10,000 of them scroll as smoothly as ten.
import { html, useEffect, useLayoutEffect, useRef, useState } from "./html.js";

/** Rows drawn beyond those in sight, above and below. */
const SPARE_ROWS = 10;
/** Tables up to this length are drawn whole: the browser's own search finds everything in them. */
const WHOLE_ROWS = 100;

/**
 * @typedef {{
 *   title: string, cell: (row: any) => any, className?: string, sort?: (row: any) => string | number, hint?: string,
 * }} Column
 * A column: its title and what it shows of a row; `sort`: what its order follows, where the table may be sorted by it.
 */

/**
 * @param {{
 *   label: string, columns: Column[], rows: any[], rowKey: (row: any) => string, empty?: any,
 *   onOpen?: (row: any) => void, isOpen?: (row: any) => boolean, height?: string,
 *   onAway?: (isAway: boolean) => void,
 * }} props
 * `onOpen`: what a click on a row, or Enter in it, does. `height`: of the part that scrolls, such as "60vh".
 * `onAway`: told at every scroll whether it is away from the top.
 */
export function Table({ label, columns, rows, rowKey, empty = "Nothing here.", onOpen, isOpen, height = "65vh", onAway }) {
  const [order, setOrder] = useState({ column: -1, isDown: false });
  const sorted = sortedRows(rows, columns[order.column]?.sort, order.isDown);
  const box = useRef(/** @type {HTMLElement | null} */ (null));
  const { first, last, rowHeight, onScroll: measure } = useWindow(box, sorted.length);
  const onScroll = () => {
    measure?.();
    onAway?.((box.current?.scrollTop ?? 0) > 0);
  };
  if (!rows.length) return html`<p class="faint empty">${empty}</p>`;
  const shown = sorted.slice(first, last);
  return html`<div class="scroll" ref=${box} style=${`max-height:${height}`} onScroll=${onScroll} tabindex="0" role="region" aria-label=${label}>
    <table aria-label=${label} aria-rowcount=${rows.length + 1}>
      <thead><tr>
        ${columns.map((column, at) => html`<${Heading} key=${column.title} column=${column} at=${at} order=${order} setOrder=${setOrder} />`)}
      </tr></thead>
      <tbody>
        ${first > 0 && html`<tr class="spacer" aria-hidden="true"><td colspan=${columns.length} style=${`height:${first * rowHeight}px`}></td></tr>`}
        ${shown.map(
          (row, at) => html`<tr
            key=${rowKey(row)}
            aria-rowindex=${first + at + 2}
            class=${onOpen ? (isOpen?.(row) ? "opens open" : "opens") : ""}
            tabindex=${onOpen ? 0 : undefined}
            onClick=${onOpen && ((/** @type {any} */ event) => isOwnClick(event) && onOpen(row))}
            onKeyDown=${onOpen && ((/** @type {any} */ event) => event.key === "Enter" && event.target === event.currentTarget && onOpen(row))}
          >${columns.map((column) => html`<td key=${column.title} class=${column.className ?? ""}>${column.cell(row)}</td>`)}</tr>`,
        )}
        ${last < sorted.length &&
        html`<tr class="spacer" aria-hidden="true"><td colspan=${columns.length} style=${`height:${(sorted.length - last) * rowHeight}px`}></td></tr>`}
      </tbody>
    </table>
  </div>`;
}

/** A click on a row itself, not on a button or a link in it, and not the end of a selection of text.
 * @param {MouseEvent} event */
function isOwnClick(event) {
  const isOther = event.target instanceof Element && event.target.closest("button, a, input, select, label, summary");
  return !isOther && !getSelection()?.toString();
}

/** @param {{column: Column, at: number, order: {column: number, isDown: boolean}, setOrder: (order: any) => void}} props */
function Heading({ column, at, order, setOrder }) {
  const isChosen = order.column === at;
  if (!column.sort) return html`<th scope="col" class=${column.className ?? ""} title=${column.hint}>${column.title}</th>`;
  const sort = isChosen ? (order.isDown ? "descending" : "ascending") : "none";
  return html`<th scope="col" class=${column.className ?? ""} aria-sort=${sort} title=${column.hint}>
    <button class="quiet sort" onClick=${() => setOrder({ column: at, isDown: isChosen && !order.isDown })}
      >${column.title}${isChosen ? (order.isDown ? " ↓" : " ↑") : ""}</button></th>`;
}

/** @param {any[]} rows @param {Column["sort"]} sort @param {boolean} isDown */
function sortedRows(rows, sort, isDown) {
  if (!sort) return rows;
  const sign = isDown ? -1 : 1;
  return [...rows].sort((left, right) => {
    const [a, b] = [sort(left), sort(right)];
    if (typeof a === "number" && typeof b === "number") return sign * (a - b);
    return sign * String(a).localeCompare(String(b), undefined, { numeric: true });
  });
}

/** Which rows are in sight. @param {{current: HTMLElement | null}} box @param {number} total */
function useWindow(box, total) {
  const [at, setAt] = useState({ top: 0, seen: 0 });
  const [rowHeight, setRowHeight] = useState(33);
  const isWhole = total <= WHOLE_ROWS;
  const measure = () => {
    if (box.current) setAt({ top: box.current.scrollTop, seen: box.current.clientHeight });
  };
  useLayoutEffect(() => {
    const row = box.current?.querySelector("tbody tr:not(.spacer)");
    const found = row?.getBoundingClientRect().height;
    if (found && Math.abs(found - rowHeight) > 0.5) setRowHeight(found);
  });
  // A table that becomes shorter and longer again is at its top again, and no event says so.
  useLayoutEffect(measure, [total]);
  useEffect(() => {
    addEventListener("resize", measure);
    return () => removeEventListener("resize", measure);
  }, []);
  if (isWhole) return { first: 0, last: total, rowHeight, onScroll: undefined };
  const seen = at.seen || 800;
  const first = Math.min(Math.max(0, Math.floor(at.top / rowHeight) - SPARE_ROWS), Math.max(0, total - 1));
  return { first, last: Math.min(total, first + Math.ceil(seen / rowHeight) + 2 * SPARE_ROWS), rowHeight, onScroll: measure };
}
