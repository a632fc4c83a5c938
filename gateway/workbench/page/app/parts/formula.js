// Formulas in TeX, written $…$, $$…$$, \(…\) or \[…\]: as MathML once KaTeX is here, which comes with the first formula.
import { signal } from "@preact/signals";
import { h } from "preact";
import { useEffect, useRef } from "preact/hooks";

/** `katex.render`; null before it is here. @type {import("@preact/signals").Signal<((tex: string, box: HTMLElement, options: any) => void) | null>} */
const katex = signal(null);
/** @type {Promise<unknown> | null} */
let loading = null;
const MODULE = "../../vendor/katex.mjs";
const OPTIONS = { output: "mathml", throwOnError: true, trust: false, strict: "ignore", maxSize: 50, maxExpand: 500 };

function load() {
  loading ??= import(/** @type {string} */ (MODULE)).then(
    () => (katex.value = /** @type {any} */ (globalThis).katex.render),
    () => (loading = null),
  );
}

/** `source`: what is shown where there is no formula of it. @param {{tex: string, source: string, isBlock: boolean}} props */
export function Formula({ tex, source, isBlock }) {
  const box = useRef(/** @type {HTMLElement | null} */ (null));
  const render = katex.value;
  useEffect(load, []);
  useEffect(() => {
    if (!render || !box.current) return;
    try {
      render(tex, box.current, { ...OPTIONS, displayMode: isBlock });
    } catch {
      box.current.textContent = source;
    }
  }, [tex, source, isBlock, render]);
  return h("span", { ref: box, class: isBlock ? "formula block" : "formula" }, render ? null : source);
}

/** A dollar beside a space, or outside beside a letter or digit, is none of a formula, nor is one before code. */
const INLINE =
  /\\\(([^]{1,2000}?)\\\)|\\\[([^]{1,2000}?)\\\]|\$\$([^$]{1,2000}?)\$\$|(?<![\p{L}\p{N}])\$(?!\s)((?:\\[^\n`]|[^$\\\n`]){1,1000}?)(?<!\s)\$(?![\p{L}\p{N}])/uy;

/** Adds formulas to a parser. @param {any} markdown */
export function formulas(markdown) {
  markdown.inline.ruler.before("escape", "formula", inline);
  markdown.block.ruler.before("fence", "formula", block, { alt: ["paragraph", "blockquote", "list"] });
}

/** @param {any} state @param {boolean} isSilent */
function inline(state, isSilent) {
  INLINE.lastIndex = state.pos;
  const found = INLINE.exec(state.src);
  if (!found || INLINE.lastIndex > state.posMax) return false;
  const [whole, round, square, double, single] = found;
  const content = (round ?? square ?? double ?? single).trim();
  if (!isSilent) Object.assign(state.push("formula", "", 0), { content, markup: whole, block: !(round ?? single) });
  state.pos += whole.length;
  return true;
}

/** @param {any} state @param {number} first @param {number} end lines @param {boolean} isSilent */
function block(state, first, end, isSilent) {
  const lineOf = (/** @type {number} */ line) => state.src.slice(state.bMarks[line] + state.tShift[line], state.eMarks[line]).trim();
  const open = lineOf(first).slice(0, 2);
  const close = open === "$$" ? "$$" : open === "\\[" ? "\\]" : "";
  let tex = lineOf(first).slice(2);
  if (!close || (tex.includes(close) && !tex.endsWith(close))) return false;
  let line = first;
  while (!tex.endsWith(close)) {
    line += 1;
    if (line >= end || state.isEmpty(line) || state.sCount[line] < state.blkIndent) return false;
    tex += `\n${lineOf(line)}`;
  }
  if (isSilent) return true;
  Object.assign(state.push("formula", "", 0), { content: tex.slice(0, -2).trim(), markup: open + tex, block: true, map: [first, line + 1] });
  state.line = line + 1;
  return true;
}
