// Code of an answer: coloured once the highlighter is here, which comes with the first block of a language.
import { signal } from "@preact/signals";
import { h } from "preact";
import { useEffect } from "preact/hooks";
import { Code } from "./widgets.js";

/** highlight.js; null before it is here. @type {import("@preact/signals").Signal<any>} */
const highlighter = signal(null);
/** @type {Promise<unknown> | null} */
let loading = null;
const MODULE = "../../vendor/highlight.mjs";
/** Longer code is not coloured: it is read again with each of its lines. */
const MAX_CHARS = 20_000;

function load() {
  loading ??= import(/** @type {string} */ (MODULE)).then(
    (module) => (highlighter.value = module.default),
    () => (loading = null),
  );
}

/** @param {{text: string, shown: string, language: string}} props `shown`: the text as it may be shown */
export function CodeBlock({ text, shown, language }) {
  useEffect(() => void (language && load()), [language]);
  const isKnown = shown.length <= MAX_CHARS && highlighter.value?.getLanguage(language);
  const tree = isKnown ? highlighter.value.highlight(shown, { language, ignoreIllegals: true })._emitter.rootNode : null;
  return h(Code, { text, shown: tree ? tree.children.map(elementOf) : shown, label: language || "Code", title: language, canWrap: true });
}

/** @param {any} node @returns {any} a text, or a piece of code with its kind as class */
function elementOf(node) {
  if (typeof node === "string") return node;
  return h("span", { class: `hl-${(node.scope ?? "").split(/[.:]/)[0]}` }, ...node.children.map(elementOf));
}
