// How fast an answer comes: the time since it was asked, its tokens, and their rate as they arrive.
import { html, useEffect, useState } from "../parts/html.js";
import { count, figure, seconds } from "../parts/format.js";
import { revisionOf } from "./chat_conversation.js";

/** @typedef {import("./chat_conversation.js").Answer} Answer */

/** A rate over less is not shown. */
const MIN_MILLISECONDS = 500;
const TICK_MILLISECONDS = 1000;
/** After so long without a token there is no rate. */
const SILENT_MILLISECONDS = 5000;
/** What arrives so soon after the first token may have waited for this page. */
const SETTLE_MILLISECONDS = 500;

/** When the last token came to this page. @type {WeakMap<Answer, number>} */
const heard = new WeakMap();

/** When the tokens arrived that this page has seen arrive. @type {WeakMap<Answer, {begun: number, since: number, last: number, tokens: number}>} */
const arrivals = new WeakMap();

/** Counts a piece of an answer, which the mesh counts as a token. @param {Answer} answer @param {boolean} isLive false: it came before this
 * page followed the answer, so that nothing is known of its time */
export function arrived(answer, isLive) {
  answer.tokens = (answer.tokens ?? 0) + 1;
  timeThinking(answer, isLive);
  const now = performance.now();
  heard.set(answer, now);
  if (!isLive) return;
  const seen = arrivals.get(answer);
  if (!seen || now - seen.begun < SETTLE_MILLISECONDS) arrivals.set(answer, { begun: seen?.begun ?? now, since: now, last: now, tokens: 0 });
  else Object.assign(seen, { last: now, tokens: seen.tokens + 1 });
}

/** Begins again: another attempt answers. @param {Answer} answer */
export function beginAgain(answer) {
  answer.tokens = 0;
  arrivals.delete(answer);
  heard.delete(answer);
}

/** Notes when thinking began, and how long it took once something follows it. @param {Answer} answer @param {boolean} isLive */
function timeThinking({ parts }, isLive) {
  const last = parts.at(-1);
  for (const part of parts) {
    if (part.kind !== "thinking") continue;
    if (part === last) part.since ??= isLive ? Date.now() : 0;
    else if (part.since) {
      if (isLive) part.seconds = (Date.now() - part.since) / 1000;
      part.since = 0;
    }
  }
}

/** Tokens per second that arrive; null: not known. @param {Answer} answer */
function rateOf(answer) {
  const { since = 0, last = 0, tokens = 0 } = arrivals.get(answer) ?? {};
  return last - since < MIN_MILLISECONDS ? null : (1000 * tokens) / (last - since);
}

/** Whole seconds; "" for none. @param {number} since in milliseconds; 0: not known */
export function elapsedSince(since) {
  const elapsed = since ? Math.floor((Date.now() - since) / 1000) : 0;
  return elapsed < 1 ? "" : elapsed < 60 ? `${elapsed} s` : seconds(elapsed);
}

/** What is known of an answer while it comes. @param {{answer: Answer}} props */
export function PaceLine({ answer }) {
  revisionOf(answer);
  const [, setTicks] = useState(0);
  useEffect(() => {
    const timer = setInterval(() => setTicks((ticks) => ticks + 1), TICK_MILLISECONDS);
    return () => clearInterval(timer);
  }, []);
  const silent = performance.now() - (heard.get(answer) ?? Infinity);
  const isSilent = silent > SILENT_MILLISECONDS;
  const rate = isSilent || answer.status ? null : rateOf(answer);
  const shown = [
    elapsedSince(answer.askedAt ?? 0), answer.tokens && `${count(answer.tokens)} ${answer.tokens === 1 ? "token" : "tokens"}`, rate && `${figure(rate)} tokens/s`,
    isSilent && `no token for ${elapsedSince(Date.now() - silent)}`,
  ];
  return html`<span class="pace faint">${shown.filter(Boolean).join(" · ")}</span>`;
}
