// Markdown as elements: the tokens of markdown-it become elements, so that no text of a model can become markup.
import MarkdownIt from "markdown-it";
import { Fragment, h } from "preact";
import { useRef } from "preact/hooks";
import { CodeBlock } from "./code_block.js";
import { Diagram } from "./diagram.js";
import { Formula, formulas } from "./formula.js";

const parser = new MarkdownIt({ html: false, linkify: true, breaks: true }).use(formulas);
parser.core.ruler.after("inline", "checkbox", checkboxes);
parser.block.ruler.before("reference", "footnote", footnote, { alt: ["paragraph"] });
parser.inline.ruler.before("link", "footnote", footnoteMark);
parser.block.ruler.before("html_block", "details", details, { alt: ["paragraph"] });
parser.linkify.set({ fuzzyLink: false, fuzzyEmail: false, fuzzyIP: false });

/** Overrides of the direction of text: "\u202Egpj.exe" reads as "exe.jpg". They are shown, not followed. */
const OVERRIDES = /[\u202D\u202E]/g;
/** In code no change of direction is followed: it hides what the code does. */
const CODE_DIRECTIONS = /[\u202A-\u202E\u2066-\u2069]/g;
/** @param {string} character */
const named = (character) => `⟦U+${character.charCodeAt(0).toString(16).toUpperCase()}⟧`;

/** The first line of collapsible text, its summary where that has its own line, and the ends of one or more in its last line. */
const DETAILS = /^<details(?: open)?>\s*(?:<summary>(.*)<\/summary>)?$/;
const SUMMARY = /^<summary>(.*)<\/summary>$/;
const CLOSED = /((?:<\/details>)+)$/;
const DETAILS_END = "</details>";
/** How deep it may be. */
const MAX_DETAILS = 20;
/** Tags in a summary that only change how it looks. */
const STYLES = /<\/?(?:b|i|u|em|strong|code|kbd|small|h[1-6])>/g;

const LINK_PROTOCOLS = new Set(["http:", "https:", "mailto:"]);

/** The address of a link as it may be followed; "" where it is none for a model's text.
 * @param {string} href */
export function safeAddress(href) {
  try {
    const url = new URL(href);
    return LINK_PROTOCOLS.has(url.protocol) ? url.href : "";
  } catch {
    return "";
  }
}

/** A text of markdown. While it grows (`isComplete` false) only its last blocks are read and drawn again.
 * @param {{text: string, isComplete?: boolean}} props */
export function Markdown({ text, isComplete = true }) {
  const blocks = useRef(/** @type {Blocks | null} */ (null));
  blocks.current ??= new Blocks();
  return h("div", { class: "markdown", dir: "auto" }, blocks.current.of(text, isComplete));
}

/** The blocks of a text that grows. A block is final once a later block has a whole line. */
export class Blocks {
  constructor() {
    this.source = "";
    /** Elements of the blocks that are final. @type {any[]} */
    this.final = [];
    /** How many characters of the source they are. */
    this.finalChars = 0;
    /** Definitions of links, which hold for the whole text. @type {any} */
    this.environment = {};
    this.isComplete = false;
    /** What was made of all of it. @type {any[]} */
    this.elements = [];
  }

  /** The elements of a text. @param {string} raw @param {boolean} isComplete @returns {any[]} */
  of(raw, isComplete) {
    const text = raw.replace(/\r\n?/g, "\n");
    if (text === this.source && isComplete === this.isComplete) return this.elements;
    // The whole text is read once more: a link may be defined after it is used.
    if (isComplete || !text.startsWith(this.source)) {
      this.final = [];
      this.finalChars = 0;
      this.environment = {};
    }
    this.source = text;
    this.isComplete = isComplete;
    const rest = text.slice(this.finalChars);
    // Of a copy: a definition whose line still grows is none yet.
    const { references, footnotes } = this.environment;
    const environment = { references: { ...references }, footnotes: { ...footnotes }, isGrowing: !isComplete };
    const groups = blocksOf(parser.parse(rest, environment));
    const elements = groups.map((group, at) => elementsOf(group, `${this.final.length + at}`));
    const end = isComplete ? 0 : finalEnd(rest, groups);
    if (end) {
      const count = groups.findIndex((group) => startOf(group, lineStarts(rest)) === end);
      parser.parse(rest.slice(0, end), this.environment);
      this.finalChars += end;
      this.final.push(...elements.splice(0, count));
    }
    return (this.elements = [...this.final, ...elements]);
  }
}

/** Where the last block begins that has a whole line: those before it do not change any more.
 * @param {string} text @param {any[][]} groups */
function finalEnd(text, groups) {
  const starts = lineStarts(text);
  const endOfLines = text.lastIndexOf("\n") + 1;
  const last = groups.findLast((group) => startOf(group, starts) < endOfLines);
  return last ? startOf(last, starts) : 0;
}

/** @param {any[]} group @param {number[]} starts of lines */
const startOf = (group, starts) => starts[group[0].map?.[0] ?? 0];

/** Tokens by the block of the outermost level that they are in. @param {any[]} tokens */
function blocksOf(tokens) {
  /** @type {any[][]} */
  const groups = [];
  let depth = 0;
  for (const token of tokens) {
    if (depth === 0) groups.push([]);
    groups[groups.length - 1].push(token);
    depth += token.nesting;
  }
  return groups;
}

/** Where each line begins. @param {string} text */
function lineStarts(text) {
  const starts = [0];
  for (let at = text.indexOf("\n"); at >= 0; at = text.indexOf("\n", at + 1)) starts.push(at + 1);
  return starts;
}

/** The element of one block. @param {any[]} tokens @param {string} key */
const elementsOf = (tokens, key) => h(Fragment, { key }, ...childrenOf(tokens));

/** The elements of tokens, those between an opening and a closing one inside it. @param {any[]} tokens @returns {any[]} */
function childrenOf(tokens) {
  /** @type {{opening: any, children: any[]}[]} */
  const stack = [{ opening: null, children: [] }];
  for (const token of tokens) {
    if (token.nesting === 1) stack.push({ opening: token, children: [] });
    else if (token.nesting === -1) {
      const { opening, children } = /** @type {{opening: any, children: any[]}} */ (stack.pop());
      stack[stack.length - 1].children.push(container(opening, children));
    } else {
      const child = leaf(token);
      if (child !== "") stack[stack.length - 1].children.push(child);
    }
  }
  return stack[0].children;
}

/** Elements without their own attributes. */
const PLAIN = new Set(["details", "summary", "p", "blockquote", "ul", "li", "thead", "tbody", "tr", "strong", "em", "s"]);

/** @param {any} token that opens it @param {any[]} children @returns {any} */
function container(token, children) {
  if (token.hidden) return h(Fragment, null, ...children);
  if (token.type === "heading_open") return h("h3", { class: `level-${token.tag.slice(1)}` }, ...children);
  if (token.type === "link_open") return link(token.attrGet("href") ?? "", children);
  if (token.type === "ordered_list_open") return h("ol", { start: token.attrGet("start") ?? undefined }, ...children);
  if (token.type === "table_open") {
    return h("div", { class: "scroll", tabIndex: 0, role: "group", "aria-label": "Table" }, h("table", null, ...children));
  }
  if (token.tag === "th" || token.tag === "td") {
    const align = /text-align:(\w+)/.exec(token.attrGet("style") ?? "")?.[1] ?? "";
    const isEmpty = children.every((child) => !child?.props?.children?.length);
    return h(isEmpty ? "td" : token.tag, { class: align && `align-${align}` }, ...children);
  }
  if (token.type === "footnote_open") return h("p", { class: "footnote" }, h("sup", null, token.content), " ", ...children);
  return h(PLAIN.has(token.tag) ? token.tag : Fragment, null, ...children);
}

/** A token without others in it. @param {any} token @returns {any} */
function leaf(token) {
  switch (token.type) {
    case "inline":
      return h(Fragment, null, ...childrenOf(token.children ?? []));
    case "softbreak":
    case "hardbreak":
      return h("br", null);
    case "code_inline":
      return h("code", null, token.content.replace(CODE_DIRECTIONS, named));
    case "fence":
    case "code_block":
      return code(token);
    case "footnote":
      return h("sup", null, token.content);
    case "formula":
      return h(Formula, { tex: token.content, source: token.markup, isBlock: token.block });
    case "checkbox":
      return h("input", { type: "checkbox", checked: token.content === "x", disabled: true, "aria-label": token.content === "x" ? "Done" : "To do" });
    case "hr":
      return h("hr", null);
    case "image":
      // Nothing is fetched from elsewhere for a text of a model: a picture is a link to it.
      return link(token.attrGet("src") ?? "", [token.content || "image"]);
    default:
      return token.content.replace(OVERRIDES, named);
  }
}

/** @param {any} token */
function code(token) {
  const language = (token.info ?? "").trim().split(/\s+/)[0].slice(0, 40);
  const text = token.content.replace(/\n$/, "");
  const shown = text.replace(CODE_DIRECTIONS, named);
  if (language === "mermaid" && isClosed(token)) return h(Diagram, { key: text, text, shown });
  return h(CodeBlock, { text, shown, language });
}

/** Whether a fence has its last line: before that, its code still grows. @param {any} token */
const isClosed = ({ map, content }) => map[1] - map[0] === content.replace(/\n$/, "").split("\n").length + 2;

/** @param {string} href @param {any[]} children */
function link(href, children) {
  const address = safeAddress(href);
  if (!address) return h("span", { class: "unfollowed", title: href }, ...children);
  return h("a", { href: address, title: address, rel: "noopener noreferrer", target: "_blank" }, ...children);
}

/** "[ ] " and "[x] " at the beginning of an item of a list. @param {any} state */
function checkboxes({ tokens, Token }) {
  tokens.forEach((/** @type {any} */ token, /** @type {number} */ at) => {
    const [first] = token.children ?? [];
    const mark = /^\[([ xX])\] /.exec(first?.content ?? "");
    if (!mark || first.type !== "text" || tokens[at - 2]?.type !== "list_item_open") return;
    first.content = first.content.slice(mark[0].length);
    const box = new Token("checkbox", "", 0);
    token.children.unshift(Object.assign(box, { content: mark[1].toLowerCase() }));
  });
}

/** The text of a footnote, "[^1]: text", which stays where it is. @param {any} state @param {number} first line @param {number} _end
 * @param {boolean} isSilent */
function footnote(state, first, _end, isSilent) {
  const line = state.src.slice(state.bMarks[first] + state.tShift[first], state.eMarks[first]);
  const found = /^\[\^([\w-]{1,20})\]:\s+(\S.*)$/.exec(line);
  if (!found) return false;
  if (isSilent) return true;
  const [, name, text] = found;
  state.env.footnotes = { ...state.env.footnotes, [name]: true };
  Object.assign(state.push("footnote_open", "", 1), { content: name, map: [first, first + 1] });
  Object.assign(state.push("inline", "", 0), { content: text, children: [], map: [first, first + 1] });
  state.push("footnote_close", "", -1);
  state.line = first + 1;
  return true;
}

/** The mark of a footnote that the text has: "[^a-z]" is none. @param {any} state @param {boolean} isSilent */
function footnoteMark(state, isSilent) {
  const found = /^\[\^([\w-]{1,20})\]/.exec(state.src.slice(state.pos, state.pos + 30));
  if (!found || !Object.hasOwn(state.env.footnotes ?? {}, found[1])) return false;
  if (!isSilent) state.push("footnote", "", 0).content = found[1];
  state.pos += found[0].length;
  return true;
}

/** `<details>` with nothing but a whole `<summary>` on its line, up to the line that ends with its `</details>`: no other HTML is read.
 * @param {any} state @param {number} first @param {number} end lines @param {boolean} isSilent */
function details(state, first, end, isSilent) {
  const lineOf = (/** @type {number} */ line) => state.src.slice(state.bMarks[line] + state.tShift[line], state.eMarks[line]).trim();
  const opening = DETAILS.exec(lineOf(first));
  if (!opening || state.level > MAX_DETAILS || state.sCount[first] - state.blkIndent > 3) return false;
  let last = first + 1;
  for (let depth = 1; last < end; last += 1) {
    const line = lineOf(last);
    if (line && state.sCount[last] < state.blkIndent) return false;
    depth += Number(line.startsWith("<details")) - Number(CLOSED.exec(line)?.[1].length ?? 0) / DETAILS_END.length;
    if (depth <= 0) break;
  }
  // While the text grows, its end is still to come.
  if (last >= end && !state.env.isGrowing) return false;
  if (isSilent) return true;
  // Of a last line with words only these are read.
  const hasWords = last < end && lineOf(last) !== DETAILS_END;
  if (hasWords) {
    const at = state.src.lastIndexOf(DETAILS_END, state.eMarks[last]);
    state.src = state.src.slice(0, at) + " ".repeat(DETAILS_END.length) + state.src.slice(at + DETAILS_END.length);
  }
  const inner = hasWords ? last + 1 : last;
  const below = opening[1] === undefined && first + 1 < inner ? SUMMARY.exec(lineOf(first + 1)) : null;
  const summary = opening[1] ?? below?.[1] ?? "";
  state.push("details_open", "details", 1).map = [first, inner];
  state.push("summary_open", "summary", 1);
  Object.assign(state.push("inline", "", 0), { content: summary.replace(STYLES, "").trim() || "Details", children: [], map: [first, first + 1] });
  state.push("summary_close", "summary", -1);
  const { lineMax, parentType } = state;
  Object.assign(state, { lineMax: inner, parentType: "details" });
  state.md.block.tokenize(state, below ? first + 2 : first + 1, inner);
  Object.assign(state, { lineMax, parentType, line: Math.min(last + 1, end) });
  state.push("details_close", "details", -1);
  return true;
}
