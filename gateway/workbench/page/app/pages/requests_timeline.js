// The timeline of one request, drawn: its waits, loads and attempts one after the other, and its first token.
import { html, useEffect, useState } from "../parts/html.js";
import { seconds } from "../parts/format.js";

/** @typedef {{kind: "queue" | "load" | "attempt" | "answer", text: string, from: number, to: number}} Span */

/** @type {Record<string, Span["kind"]>} */
const KINDS = { queued: "queue", loading: "load", load_started: "load", placed: "attempt", retried: "queue" };
const TITLES = { queue: "in the queue", load: "load", attempt: "until its first token", answer: "answer" };

/** What happened one after the other, in seconds after its arrival. @param {any} record @param {number} now @returns {Span[]} */
export function spansOf(record, now) {
  const arrived = Date.parse(record.arrivedAt);
  const end = record.endedAt ? Math.max(0, (Date.parse(record.endedAt) - arrived) / 1000) : Math.max(0, (now - arrived) / 1000);
  /** @type {Span[]} */
  const spans = [{ kind: "queue", text: "", from: 0, to: end }];
  for (const decision of record.decisions ?? []) {
    const at = Math.min(decision.ageSeconds, end);
    const last = spans[spans.length - 1];
    if (decision.kind === "failed") {
      last.text = decision.detail;
      continue;
    }
    const kind = KINDS[decision.kind] ?? last.kind;
    if (kind === last.kind && kind !== "attempt") {
      last.text = decision.detail;
      continue;
    }
    last.to = at;
    spans.push({ kind, text: decision.detail, from: at, to: end });
  }
  const first = record.receipt?.timeToFirstTokenSeconds;
  const last = spans[spans.length - 1];
  if (first !== undefined && last.kind === "attempt" && first <= end) {
    last.to = Math.max(last.from, first);
    spans.push({ kind: "answer", text: "", from: last.to, to: end });
  }
  return spans.filter((span, index) => span.to - span.from > 0 || (span.kind !== "queue" && index === spans.length - 1));
}

/** @param {{record: any}} props */
export function Timeline({ record }) {
  const now = useNow(record.state !== "ended");
  const spans = spansOf(record, now);
  const end = spans.length ? spans[spans.length - 1].to : 0;
  const whole = end || 1;
  const first = record.receipt?.timeToFirstTokenSeconds;
  const told = spans.map((span) => `${TITLES[span.kind]} ${seconds(span.to - span.from)}`).join(", ");
  return html`<div class="timeline">
    <div class="track" role="img" aria-label=${`Timeline: ${told || "nothing yet"}`}>
      ${spans.map((span) => html`<span class=${`span-${span.kind}`} style=${`left:${(100 * span.from) / whole}%;width:${(100 * (span.to - span.from)) / whole}%`} title=${`${TITLES[span.kind]}: ${seconds(span.to - span.from)}${span.text ? `\n${span.text}` : ""}`}></span>`)}
      ${first !== undefined && first <= end && html`<span class="mark" style=${`left:${(100 * first) / whole}%`} title=${`time to first token ${seconds(first)}`}></span>`}
    </div>
    <div class="row faint ends"><span>0 s</span><span>${seconds(end)}</span></div>
    <ol class="spans">${spans.map(
      (span) => html`<li><span class="key span-${span.kind}"></span><span class="what">${TITLES[span.kind]}</span><span class="value">${seconds(span.to - span.from)}</span><span class="faint">${span.text}</span></li>`,
    )}</ol>
  </div>`;
}

/** The time, each second while a request continues. @param {boolean} isRunning */
export function useNow(isRunning) {
  const [now, setNow] = useState(Date.now());
  useEffect(() => {
    if (!isRunning) return;
    const timer = setInterval(() => setNow(Date.now()), 1000);
    return () => clearInterval(timer);
  }, [isRunning]);
  return now;
}
