// The report of a trial: what its checks and people found of both sides, its pairs, and the switch to its candidate.
import { html, useState } from "weft/parts/html.js";
import { put, segment } from "weft/api.js";
import { collection } from "weft/live.js";
import { address, go } from "weft/navigation.js";
import { can } from "weft/session.js";
import { command } from "weft/parts/commands.js";
import { Confirm } from "weft/parts/dialog.js";
import { clock, figure, seconds, words } from "weft/parts/format.js";
import { notify } from "weft/parts/notices.js";
import { Table } from "weft/parts/table.js";
import { Code, Facts, State } from "weft/parts/widgets.js";
import { declaredOf } from "weft/pages/settings_kinds.js";
import { unjudged } from "./trials_pair.js";

/** @param {{report: any, manifest: any}} props */
export function Report({ report, manifest }) {
  const [isAsking, setAsking] = useState(false);
  const alias = manifest?.alias && collection("alias").value.items.get(manifest.alias);
  const open = unjudged(report);
  const { summary, candidate, against } = report;
  const isSwitched = alias?.target === candidate;
  // Somebody may have pointed it elsewhere since.
  const canMove = isSwitched || alias?.target === against;
  return html`<div class="row title"><h1 class="mono">${report.name}</h1>
      ${open.length > 0 && can("inference:edit") && html`<button class="main" onClick=${() => go(`trials/${report.name}`, { pair: open[0].task })}>Judge ${open.length} ${open.length === 1 ? "pair" : "pairs"}</button>`}
      ${canMove && can("models:edit") && html`<button onClick=${() => setAsking(true)}>${isSwitched ? `Revert to ${against}` : `Switch to ${candidate}`}</button>`}</div>
    <p><${TrialState} report=${report} /></p>
    <section class="panel"><${Facts} facts=${[
      ["Pairs", `${summary.answered} answered, ${summary.waiting} waiting, ${summary.failed} failed`],
      ["Share", manifest && `${manifest.sharePercent} % of the requests of ${manifest.tenant}`],
      ["Alias", alias && `${alias.name} → ${alias.target}`],
      ["Equal tool calls", summary.withToolCalls && `${summary.sameToolCalls} of ${summary.withToolCalls}`],
      ["Length ratio", summary.lengthRatio !== undefined && html`<span title="median of the candidate's tokens per token of the other answer">${figure(summary.lengthRatio)}</span>`],
      ["Judged equally good", summary.same],
    ]} /></section>
    <${Table} label="Checks" rows=${checksOf(summary)} rowKey=${(/** @type {any} */ row) => row[0]} columns=${[
      { title: "Check", cell: (/** @type {any} */ row) => row[0] },
      { title: candidate, cell: (/** @type {any} */ row) => row[1], className: "number" },
      { title: against, cell: (/** @type {any} */ row) => row[2], className: "number" },
    ]} />
    <h2 class="pairs">Pairs</h2>
    <${Table} label="Pairs" rows=${report.pairs} rowKey=${(/** @type {any} */ pair) => pair.task} columns=${columnsOf(report)} empty="No pairs yet." />
    ${isAsking && html`<${SwitchDialog} name=${report.name} alias=${alias} target=${isSwitched ? against : candidate} isBack=${isSwitched} onClose=${() => setAsking(false)} />`}`;
}

/** Whether a trial gets further pairs. @param {{report: any}} props */
export const TrialState = ({ report }) => html`<${State} value=${report.stopped ? "stopped" : "running"} />${report.stopped && ` ${report.stopped}`}`;

/** What was found of the candidate, and of the other model. @param {any} summary @returns {[string, string, string][]} */
function checksOf({ withSchema, candidateValid, againstValid, candidateSpeed, againstSpeed, candidatePreferred, againstPreferred }) {
  /** @type {(of: (speed: any) => string) => [string, string]} */
  const both = (of) => [of(candidateSpeed) || "–", of(againstSpeed) || "–"];
  return [
    ["Preferred", String(candidatePreferred), String(againstPreferred)],
    ["Matches the schema", withSchema ? `${candidateValid} of ${withSchema}` : "–", withSchema ? `${againstValid} of ${withSchema}` : "–"],
    ["First token (median)", ...both((speed) => seconds(speed.firstTokenSeconds))],
    ["Tokens/s (median)", ...both((speed) => figure(speed.tokensPerSecond))],
  ];
}

/** @param {any} report @returns {import("weft/parts/table.js").Column[]} */
function columnsOf({ name, candidate, against }) {
  const yesNo = (/** @type {boolean | undefined} */ value) => (value === undefined ? "–" : value ? "yes" : "no");
  /** @type {Record<string, string>} */
  const preferred = { candidate, against, same: "same" };
  /** Of the candidate, then of the other answer. @type {(first: string, second: string) => string} */
  const both = (first, second) => (first || second ? `${first || "–"} / ${second || "–"}` : "–");
  return [
    { title: "Request", cell: (pair) => (pair.state === "answered" ? html`<a href=${address(`trials/${name}`, { pair: pair.task })}>${clock(pair.createdAt)}</a>` : clock(pair.createdAt)), sort: (pair) => pair.createdAt },
    { title: "State", cell: (pair) => html`<${State} value=${pair.state} title=${pair.error} />`, sort: (pair) => pair.state },
    { title: "Preferred", cell: (pair) => preferred[pair.verdict] ?? "–", sort: (pair) => pair.verdict ?? "", className: "long" },
    { title: "Schema", hint: "whether the candidate's answer and the other one match the schema", cell: ({ checks: { candidateValid, againstValid } = {} }) => (candidateValid === undefined ? "–" : `${yesNo(candidateValid)} / ${yesNo(againstValid)}`) },
    { title: "Equal tool calls", cell: ({ checks }) => yesNo(checks?.sameToolCalls) },
    { title: "Length ratio", hint: "the candidate's tokens per token of the other answer", cell: ({ checks }) => figure(checks?.lengthRatio) || "–", className: "number", sort: ({ checks }) => checks?.lengthRatio ?? -1 },
    { title: "Tokens/s", hint: "of the candidate and of the other answer", cell: ({ checks }) => both(figure(checks?.candidateSpeed?.tokensPerSecond), figure(checks?.againstSpeed?.tokensPerSecond)), className: "number" },
    { title: "Task", cell: (pair) => html`<a class="mono" href=${address(`tasks/${pair.task}`)}>${pair.task}</a>` },
    { title: "Error", cell: (pair) => pair.error, className: "wrap" },
  ];
}

/** @param {{name: string, alias: any, target: string, isBack: boolean, onClose: () => void}} props */
function SwitchDialog({ name, alias, target, isBack, onClose }) {
  const verb = isBack ? "revert" : "switch";
  return html`<${Confirm} title=${`${isBack ? "Revert" : "Switch"} to ${target}`} action=${isBack ? "Revert" : "Switch"} onClose=${onClose}
    text=${html`<p>The next requests for <strong>${alias.name}</strong> go to ${target} instead of ${alias.target}. Running requests finish.</p>
      <${Code} label="Command" text=${command("models", "trial", verb, name)} />`}
    onDo=${async () => {
      const { results } = await put(`/api/v1/aliases/${segment(alias.name)}`, { ...declaredOf(alias), target });
      notify(`alias ${alias.name} ${words(results[0].outcome)}`);
    }} />`;
}
