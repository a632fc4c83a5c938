// A request as a waterfall: a row for each piece, from its arrival to its end, with what went wrong beside it.
import { html } from "../parts/html.js";
import { address } from "../navigation.js";
import { can } from "../session.js";
import { count, figure, seconds, words } from "../parts/format.js";
import { useNow } from "../parts/use_now.js";
import { Code } from "../parts/widgets.js";
import { attemptsOf } from "./requests_words.js";

/** @typedef {"queue" | "load" | "attempt" | "prompt" | "answer" | "tool" | "failed"} Kind */
/** @typedef {{kind: Kind, title: string, text: string, from: number, to: number, isPart?: boolean, attempt?: any}} Piece
 * `from`, `to`: seconds after the arrival. `isPart`: of the attempt above it. `attempt`: what the receipt says of it. */

/** @type {Record<string, Kind>} */
const KINDS = { queued: "queue", loading: "load", load_started: "load" };
/** @type {Record<string, string>} */
const TITLES = { queue: "Queue", load: "Load" };

/** @param {any} record @param {number} now @returns {Piece[]} */
export function piecesOf(record, now) {
  const arrived = Date.parse(record.arrivedAt);
  const end = Math.max(0, ((record.endedAt ? Date.parse(record.endedAt) : now) - arrived) / 1000);
  const pieces = /** @type {Piece[]} */ ([{ kind: "queue", title: TITLES.queue, text: "", from: 0, to: end }]);
  let attempts = 0;
  for (const { kind, ageSeconds, detail, candidates } of record.decisions ?? []) {
    const last = pieces[pieces.length - 1];
    const begin = (/** @type {Partial<Piece>} */ piece) => {
      last.to = Math.min(ageSeconds, end);
      pieces.push({ kind: "queue", title: TITLES.queue, text: detail, from: last.to, to: end, ...piece });
    };
    if (kind === "placed") begin({ kind: "attempt", title: attemptTitle((attempts += 1), candidates), text: "" });
    else if (kind === "rejected") begin({ kind: "failed", title: "Refused" });
    else if (!(kind in KINDS)) {
      if (last.kind === "attempt") begin({ text: "" });
      Object.assign(last, last.kind === "attempt" ? { kind: "failed", text: detail } : { text: detail });
    } else if (last.kind === KINDS[kind]) last.text = detail;
    else begin({ kind: KINDS[kind], title: TITLES[KINDS[kind]] });
  }
  if (pieces.length > 1 && record.state === "ended" && pieces.at(-2)?.kind === "failed") {
    const { to } = /** @type {Piece} */ (pieces.pop());
    /** @type {Piece} */ (pieces.at(-1)).to = to;
  }
  const tries = attemptsOf(record);
  if (tries.length > attempts && tries.every((each) => each.startSeconds !== undefined)) pieces.splice(0, pieces.length, ...piecesOfAttempts(tries, end));
  addAttempts(pieces, tries);
  addParts(pieces, record.receipt ?? {});
  return pieces.filter((piece) => piece.to > piece.from || !["queue", "load"].includes(piece.kind));
}

/** The attempts and the pauses between them, where not all decisions are known. @param {any[]} attempts @param {number} end @returns {Piece[]} */
function piecesOfAttempts(attempts, end) {
  const pieces = /** @type {Piece[]} */ ([]);
  let from = 0;
  attempts.forEach(({ startSeconds: start, durationSeconds: took, model, runner }, at) => {
    pieces.push({ kind: "queue", title: at ? "Pause" : TITLES.queue, text: "", from, to: start });
    from = took === undefined ? (attempts[at + 1]?.startSeconds ?? end) : start + took;
    pieces.push({ kind: "attempt", title: `Attempt ${at + 1}${runner ? `: ${model} on ${runner}` : ""}`, text: "", from: start, to: from });
  });
  return pieces;
}

/** @param {number} number @param {any[]} candidates */
function attemptTitle(number, candidates = []) {
  const chosen = candidates.find((each) => each.chosen);
  return chosen ? `Attempt ${number}: ${chosen.model} on ${chosen.runner}` : `Attempt ${number}`;
}

/** @param {Piece} piece */
const isAttempt = ({ title }) => title.startsWith("Attempt");

/** Adds how each attempt ended. @param {Piece[]} pieces @param {any[]} known */
function addAttempts(pieces, known) {
  const placed = pieces.filter(isAttempt);
  known.forEach((/** @type {any} */ attempt, /** @type {number} */ at) => {
    // Only the latest decisions are stored.
    const piece = placed[at - Math.max(0, known.length - placed.length)];
    if (!piece) return;
    piece.attempt = attempt;
    if (attempt.reason && attempt.reason !== "cancelled") piece.kind = "failed";
  });
}

/** Adds the parts of the attempt that answered. @param {Piece[]} pieces @param {any} receipt */
function addParts(pieces, receipt) {
  const first = receipt.timeToFirstTokenSeconds;
  const at = pieces.findIndex((piece) => isAttempt(piece) && piece.from <= first && first <= piece.to);
  if (at < 0) return;
  const { from, to } = pieces[at];
  const prefill = receipt.engineTimings?.prefillSeconds;
  const tools = (receipt.toolRuns ?? []).map((/** @type {any} */ run) => ({
    kind: run.failed ? "failed" : "tool", title: `Tool ${run.tool}`, text: "", from: run.startSeconds, to: run.startSeconds + (run.durationSeconds ?? to - run.startSeconds), isPart: true,
  }));
  const tokens = [`${count(receipt.completionTokens ?? 0)} tokens`, receipt.tokensPerSecond && `${figure(receipt.tokensPerSecond)} tokens/s`,
    receipt.toolRunCount && (receipt.toolRunCount === 1 ? "1 tool call" : `${count(receipt.toolRunCount)} tool calls`)];
  pieces.splice(at + 1, 0,
    { kind: "prompt", title: prefill ? "Prompt processing" : "Until first token", text: "", from: prefill ? Math.max(from, first - prefill) : from, to: first, isPart: true },
    { kind: "answer", title: "Tokens", text: tokens.filter(Boolean).join(", "), from: first, to, isPart: true },
    ...tools,
  );
}

/** @param {{record: any}} props */
export function Waterfall({ record }) {
  const now = useNow(record.state !== "ended");
  const pieces = piecesOf(record, now);
  const end = pieces.reduce((last, piece) => Math.max(last, piece.to), 0);
  return html`<div class="row faint ends" aria-hidden="true"><span>0 s</span><span>${seconds(end / 2)}</span><span>${seconds(end)}</span></div>
    <ol class="waterfall" aria-label="Timeline">${pieces.map((piece, at) => html`<${Row} key=${at} piece=${piece} end=${end || 1} />`)}</ol>`;
}

/** @param {{piece: Piece, end: number}} props */
function Row({ piece, end }) {
  const { kind, title, text, from, to, isPart, attempt } = piece;
  const told = text || [words(attempt?.reason), attempt?.message].filter(Boolean).join(": ");
  return html`<li class=${isPart ? "part" : ""}>
    <span class="what">${title}${kind === "failed" && title !== "Refused" && html` <span class="state bad">failed</span>`}</span>
    <span class="track" aria-hidden="true"><span class=${`span-${kind}`} style=${`left:${(100 * from) / end}%;width:${(100 * (to - from)) / end}%`}></span></span>
    <span class="value">${seconds(to - from)}</span>
    ${told && html`<span class=${kind === "failed" ? "about problem" : "about faint"}>${told}</span>`}
    ${attempt && (attempt.reason || attempt.engineExit) && html`<${Engine} attempt=${attempt} />`}</li>`;
}

/** What the engine of a failed attempt left. @param {{attempt: any}} props */
function Engine({ attempt }) {
  const { model, runner, engineExit, engineLog } = attempt;
  return html`<div class="about">
    ${engineExit && html`<p>Engine ended: ${engineExit}</p>`}
    ${engineLog && html`<${Code} label="Engine log" title="Last lines of the engine" text=${engineLog.join("\n")} />`}
    ${can("runners:view") && html`<p><a href=${address(`runners/${runner}`, { log: model })}>Engine log of ${model} on ${runner}</a></p>`}
  </div>`;
}
