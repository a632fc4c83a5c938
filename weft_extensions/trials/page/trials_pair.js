// One pair of a trial: a prompt and its two answers, which are judged before it is shown whose they are.
import { html, useEffect, useRef, useState } from "weft/parts/html.js";
import { get, post, segment } from "weft/api.js";
import { address, go } from "weft/navigation.js";
import { can } from "weft/session.js";
import { Markdown } from "weft/parts/markdown.js";
import { attempt } from "weft/parts/notices.js";
import { Code, ErrorNote } from "weft/parts/widgets.js";

/** @type {[string, string, string][]} The verdict as it is sent, its button, and its key. */
const CHOICES = [["a", "A is better", "A"], ["same", "Same", "S"], ["b", "B is better", "B"]];
/** A line before a part of a text: who says it, or what it is. */
const LABEL = /^\[((?:system|developer|user|assistant|tool|prompt|answer|reasoning|refusal)(?: [^\]]{1,80})?)\]$/;

/** Pairs with two answers and no verdict. @param {any} report @returns {any[]} */
export const unjudged = (report) => report.pairs.filter((/** @type {any} */ pair) => pair.state === "answered" && !pair.verdict);

/** @param {{report: any, task: string, onJudged: (task: string, verdict: string) => void}} props */
export function Pair({ report, task, onJudged }) {
  const path = `/v1/trials/${segment(report.name)}/pairs/${segment(task)}`;
  const [found, setFound] = useState(/** @type {{details: any, error: unknown}} */ ({ details: null, error: null }));
  const [last, setLast] = useState(/** @type {any} */ (null));
  const isBusy = useRef(false);
  useEffect(() => {
    const stop = new AbortController();
    setFound({ details: null, error: null });
    get(path, {}, stop.signal).then(
      (details) => setFound({ details, error: null }),
      (error) => stop.signal.aborted || setFound({ details: null, error }),
    );
    scrollTo(0, 0);
    return () => stop.abort();
  }, [path]);
  const { error } = found;
  const details = found.details?.task === task ? found.details : null;
  const isJudged = Boolean(details?.aBy);
  const left = unjudged(report);
  const judge = async (/** @type {string} */ verdict) => {
    if (isBusy.current || !details || !can("inference:edit")) return;
    isBusy.current = true;
    await attempt(async () => {
      const judged = await post(`${path}/verdict`, { verdict });
      const next = left.find((pair) => pair.task !== task);
      onJudged(task, judged.verdict);
      setLast(judged);
      setFound({ details: judged, error: null });
      if (next) go(`trials/${report.name}`, { pair: next.task });
    });
    isBusy.current = false;
  };
  // A key that is pressed once too often changes no verdict: a button does.
  useKeys((verdict) => isJudged || judge(verdict));
  return html`<div class="row title"><h1>Judge</h1><span class="faint" role="status">${left.length} unjudged</span></div>
    ${last && last.task !== task && html`<p role="status">Last pair: ${told(report, last)} <a href=${address(`trials/${report.name}`, { pair: last.task })}>Show it</a></p>`}
    ${!details && !error && html`<div class="skeleton" role="status" aria-label="Loading"></div>`}
    <${ErrorNote} error=${error} />
    ${details &&
    html`<${Prompt} text=${details.prompt} />
      <div class="split">${["a", "b"].map((side) => html`<section key=${`${task} ${side}`} class="panel" aria-label=${`Answer ${side.toUpperCase()}`}>
        <h2>${side.toUpperCase()}${isJudged && html` <bdi class="faint">${bothOf(report, details)[side]}</bdi>`}</h2><${Answer} text=${details[side].text} /></section>`)}</div>`}
    <div class="verdict">${isJudged && html`<p role="status">${told(report, details)}${left.length ? "" : " All answered pairs are judged."}</p>`}
      ${can("inference:edit") && html`<div class="row">${CHOICES.map(([verdict, title, key]) => html`<button key=${verdict} aria-keyshortcuts=${key} aria-pressed=${isJudged ? verdictOf(details, report) === verdict : undefined}
        onClick=${() => judge(verdict)}>${title} <kbd aria-hidden="true">${key}</kbd></button>`)}</div>`}</div>`;
}

/** Judges by the keys of CHOICES, wherever the focus is. @param {(verdict: string) => unknown} judge */
function useKeys(judge) {
  const latest = useRef(judge);
  latest.current = judge;
  useEffect(() => {
    const onKeyDown = (/** @type {KeyboardEvent} */ event) => {
      const isOther = event.ctrlKey || event.metaKey || event.altKey || event.repeat || document.querySelector("dialog[open]");
      const chosen = CHOICES.find(([, , key]) => key === event.key.toUpperCase());
      if (chosen && !isOther && !event.defaultPrevented) latest.current(chosen[0]);
    };
    addEventListener("keydown", onKeyDown);
    return () => removeEventListener("keydown", onKeyDown);
  }, []);
}

/** Whose answers a judged pair has. @param {any} report @param {any} details @returns {Record<string, string>} */
const bothOf = ({ candidate, against }, { aBy }) => ({ a: aBy, b: aBy === candidate ? against : candidate });

/** The verdict by side. @param {any} details @param {any} report */
const verdictOf = ({ verdict, aBy }, { candidate }) => (verdict === "same" ? "same" : (verdict === "candidate") === (aBy === candidate) ? "a" : "b");

/** What was decided about a judged pair, and about whom. @param {any} report @param {any} details */
function told(report, details) {
  const by = bothOf(report, details);
  const verdict = verdictOf(details, report);
  return `A is by ${by.a}, B by ${by.b}. ${verdict === "same" ? "You found them equally good." : `You preferred ${by[verdict]}.`}`;
}

/** The parts of a text, with their labels. @param {string} text @returns {{label: string, text: string}[]} */
function partsOf(text) {
  const parts = [{ label: "", text: "" }];
  for (const line of text.split("\n")) {
    const label = LABEL.exec(line)?.[1];
    if (label) parts.push({ label, text: "" });
    else parts[parts.length - 1].text += `${line}\n`;
  }
  return parts.map(({ label, text: said }) => ({ label, text: said.trim() })).filter((part) => part.text || part.label);
}

/** The last message of the prompt, and those before it on demand. @param {{text: string}} props */
function Prompt({ text }) {
  const parts = partsOf(text);
  const said = (/** @type {{label: string, text: string}} */ part, /** @type {number} */ at) => html`<p key=${at} class="faint">${part.label}</p><div class="answer" dir="auto">${part.text}</div>`;
  return html`<section class="panel" aria-label="Prompt"><h2>Prompt</h2>
    ${parts.length > 1 && html`<details><summary>${parts.length - 1} earlier ${parts.length === 2 ? "message" : "messages"}</summary>${parts.slice(0, -1).map(said)}</details>`}
    ${parts.slice(-1).map(said)}</section>`;
}

/** An answer as the chat shows it. @param {{text: string}} props */
function Answer({ text }) {
  const parts = partsOf(text);
  if (!parts.length) return html`<p class="faint">The answer is empty.</p>`;
  return parts.map(({ label, text: said }, at) => {
    if (label === "reasoning") return html`<details key=${at} class="below"><summary class="faint">Thinking</summary><${Markdown} text=${said} /></details>`;
    if (label.startsWith("tool")) return html`<${Code} key=${at} label=${label} title=${label} text=${said} />`;
    return html`<${Markdown} key=${at} text=${said} />`;
  });
}
