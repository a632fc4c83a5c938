// One answer of a model: its thinking, words, tools and notices, what it waits for, its error and its receipt.
import { html, useState } from "../parts/html.js";
import { Dialog } from "../parts/dialog.js";
import { Markdown } from "../parts/markdown.js";
import { count, figure, seconds } from "../parts/format.js";
import { RetryText } from "../parts/retry.js";
import { Code, Facts, Progress } from "../parts/widgets.js";
import { address } from "../navigation.js";
import { isRunning, revisionOf, textOf } from "./chat_conversation.js";
import { Edit } from "./chat_edit.js";
import { ModelPicker } from "./chat_models.js";
import { PaceLine, elapsedSince } from "./chat_pace.js";
import { continueAnswer, editAnswer, regenerate, showAnswer, stop } from "./chat_state.js";
import { Versions } from "./chat_versions.js";

/** @typedef {import("./chat_conversation.js").Answer} Answer */
/** @typedef {import("./chat_conversation.js").Part} Part */

/** @param {{answer: Answer, at: number, column: number, onCode: () => void}} props */
export function AnswerView({ answer, at, column, onCode }) {
  revisionOf(answer);
  const runs = isRunning(answer);
  // The id of the version that is edited, or asked of another model.
  const [edited, setEdited] = useState("");
  const [asked, setAsked] = useState("");
  const lastText = answer.parts.findLastIndex((part) => part.kind === "text" || part.kind === "thinking");
  return html`<article class="reply" aria-busy=${runs}>
    <h2 class="who-says"><bdi>${answer.model}</bdi></h2>
    ${edited === answer.id
      ? html`<${Edit} text=${textOf(answer)} label="Edited answer" action="Save"
          onDone=${(/** @type {string | null} */ text) => (setEdited(""), text !== null && editAnswer(at, column, text))} />`
      : answer.parts.map((part, number) => html`<${PartView} key=${`${answer.id} ${number}`} part=${part} revision=${partRevision(part)}
      isGrowing=${runs && number === lastText} isLast=${number === answer.parts.length - 1} />`)}
    ${runs && html`<${Wait} answer=${answer} />`}
    ${answer.state === "complete" && !answer.parts.length && html`<p class="faint">The answer is empty.</p>`}
    ${answer.isEdited && html`<p class="faint">Edited.</p>`}
    ${answer.state === "stopped" && html`<p class="faint">Stopped.</p>`}
    ${answer.finishReason === "length" && html`<p class="faint">Truncated: the token limit was reached.</p>`}
    ${answer.error && html`<p class="problem" role="alert">${answer.error.message}${answer.error.code && html` <code>${answer.error.code}</code>`}</p>`}
    <div class="actions"><${Versions} versions=${answer.versions} isDisabled=${runs} onShow=${(/** @type {number} */ number) => showAnswer(at, column, number)} />
      ${runs ? html`<${PaceLine} answer=${answer} />` : html`<${CopyButton} text=${textOf(answer)} />
        <button class="quiet" onClick=${() => regenerate(at, column)}>${answer.error || answer.state === "stopped" ? "Retry" : "Regenerate"}</button>
        ${textOf(answer) && (answer.finishReason === "length" || answer.state === "stopped") && html`<button class="quiet" onClick=${() => continueAnswer(at, column)}>Continue</button>`}
        <button class="quiet" onClick=${() => setAsked(answer.id)}>Other model</button>
        <button class="quiet" onClick=${() => setEdited(answer.id)}>Edit answer</button>
        <button class="quiet" onClick=${onCode}>Show as code</button>`}
    </div>
    ${!runs && html`<${Receipt} key=${answer.id} answer=${answer} />`}
    ${asked === answer.id && html`<${OtherModel} answer=${answer} onClose=${() => setAsked("")} onChoose=${(/** @type {string} */ model) => regenerate(at, column, model)} />`}
  </article>`;
}

/** Asks another model for an answer. @param {{answer: Answer, onChoose: (model: string) => void, onClose: () => void}} props */
function OtherModel({ answer, onChoose, onClose }) {
  revisionOf(answer);
  const [model, setModel] = useState(answer.model);
  return html`<${Dialog} title="Regenerate with another model" onClose=${onClose}>
    <${ModelPicker} value=${model} label="Other model" onChoose=${setModel} />
    <div class="buttons"><button onClick=${onClose}>Cancel</button>
      <button class="main" onClick=${() => (onClose(), onChoose(model))}>Regenerate</button></div>
  </${Dialog}>`;
}

/** What changes of a part, so that parts that do not are left alone. @param {Part} part */
const partRevision = (part) => (part.kind === "tool" ? `${part.arguments.length} ${part.result?.length}` : part.kind === "lost" ? part.why : part.text.length);

/** @param {{part: Part, revision: string | number, isGrowing: boolean, isLast: boolean}} props */
function PartView({ part, isGrowing, isLast }) {
  switch (part.kind) {
    case "text":
      return html`<${Markdown} text=${part.text} isComplete=${!isGrowing} />`;
    case "thinking":
      return html`<details class="thinking"><summary>${thinkingOf(part, isGrowing && isLast)}</summary>
        <${Markdown} text=${part.text} isComplete=${!isGrowing} /></details>`;
    case "tool":
      return html`<details class="notice-part"><summary>Tool <code>${part.name}</code>${
        part.result === null ? "" : part.isFailed ? html` <span class="problem">failed</span>` : " done"}</summary>
        <${Code} label="Arguments" title="Arguments" text=${part.arguments} />
        ${part.result !== null && html`<${Code} label="Result" title="Result" text=${part.result} />`}</details>`;
    case "lost":
      return html`<details class="notice-part"><summary>Interrupted: ${part.why || "the attempt was lost"}</summary>
        <${Markdown} text=${part.text} /></details>`;
    case "signal":
      return html`<details class="notice-part"><summary>Signal <code>${part.name}</code></summary><${Code} label="Arguments" text=${part.text} /></details>`;
    default:
      return html`<p class="notice-part warning">${part.text} <code>${part.code}</code></p>`;
  }
}

/** @param {{since?: number, seconds?: number}} part @param {boolean} isGrowing */
function thinkingOf({ since, seconds: took }, isGrowing) {
  if (!isGrowing) return took ? `Thinking · ${seconds(took)}` : "Thinking";
  return `Thinking… ${elapsedSince(since ?? 0)}`.trim();
}

/** What an answer waits for. @param {{answer: Answer}} props */
function Wait({ answer }) {
  revisionOf(answer);
  if (answer.retry && !answer.status) {
    return html`<p class="wait problem" role="status"><${RetryText} retry=${answer.retry} most=${answer.retry.most} /> <button class="quiet" onClick=${() => stop(answer)}>Stop trying</button></p>`;
  }
  if (answer.state === "streaming" && answer.parts.length && !answer.status) return html`<span class="cursor" aria-hidden="true"></span>`;
  return html`<p class="wait faint" role="status">${answer.status || "Waiting for the first token…"}
    ${answer.share !== null && html`<${Progress} value=${answer.share} label="Progress" />`}</p>`;
}

/** @param {{text: string}} props */
function CopyButton({ text }) {
  const [isCopied, setCopied] = useState(false);
  if (!text || !navigator.clipboard) return null;
  const copy = async () => {
    await navigator.clipboard.writeText(text);
    setCopied(true);
    setTimeout(() => setCopied(false), 1500);
  };
  return html`<button class="quiet" onClick=${copy}>${isCopied ? "Copied" : "Copy"}</button>`;
}

/** @param {number} number */
const tokens = (number) => `${count(number)} ${number === 1 ? "token" : "tokens"}`;

/** @param {number} queue seconds @param {number} load seconds */
function waited(queue, load) {
  const parts = [queue >= 0.001 && `${seconds(queue)} in the queue`, load >= 0.001 && `${seconds(load)} for loads`];
  return parts.filter(Boolean).join(", ") || "no";
}

/** What the stream itself says of its receipt: for a key that may not see requests, or for an answer of long ago.
 * @param {{answer: Answer}} props */
function StreamReceipt({ answer }) {
  revisionOf(answer);
  const { facts, usage } = answer;
  if (!usage) return null;
  const milliseconds = (/** @type {string} */ name) => Number(facts[name] ?? 0) / 1000;
  const left = facts["x-left-premises"];
  const shown = [
    `${count(usage.prompt_tokens)} tokens in`,
    usage.prompt_tokens_details?.cached_tokens > 0 && `${count(usage.prompt_tokens_details.cached_tokens)} of them cached`,
    `${count(usage.completion_tokens)} out`,
    `waited: ${waited(milliseconds("x-queue-wait-ms"), milliseconds("x-load-wait-ms"))}`,
    left && (left === "true" ? "sent to a remote provider" : "not sent to a remote provider"),
  ];
  return html`<p class="receipt faint">${shown.filter(Boolean).join(" · ")}</p>`;
}

/** @param {{answer: Answer}} props */
function Receipt({ answer }) {
  revisionOf(answer);
  const found = answer.receipt?.receipt;
  if (!found) return html`<${StreamReceipt} answer=${answer} />`;
  const waits = (answer.receipt.decisions ?? []).filter((/** @type {any} */ decision) => decision.kind !== "placed");
  const runners = found.attempts.map((/** @type {any} */ attempt) => `${attempt.model} on ${attempt.runner}${attempt.reason ? `: ${attempt.reason}` : ""}`);
  const summary = [
    found.outcome, seconds(found.totalSeconds), found.completionTokens && tokens(found.completionTokens),
    found.tokensPerSecond && `${figure(found.tokensPerSecond)}/s`, found.attempts.at(-1)?.runner, found.leftPremises && "sent to a remote provider",
  ];
  return html`<details class="receipt"><summary>${summary.filter(Boolean).join(" · ")}</summary>
    <${Facts} facts=${[
      ["Waited", waited(found.queueWaitSeconds, found.loadWaitSeconds)],
      ["Time to first token", seconds(found.timeToFirstTokenSeconds)],
      ["Tokens in", found.promptTokens === undefined ? "" : `${found.promptEstimated ? "about " : ""}${count(found.promptTokens)} (${count(found.cachedPromptTokens ?? 0)} cached)`],
      ["Tokens out", count(found.completionTokens)],
      ["Tokens per second", figure(found.tokensPerSecond)],
      ["Attempts", runners.join("; ")],
      ["Sent to a remote provider", found.leftPremises ? "yes" : "no"],
    ]} />
    ${waits.length > 0 && html`<ul class="waits">${waits.map((/** @type {any} */ decision) => html`<li>+${seconds(decision.ageSeconds)} ${decision.kind}: ${decision.detail}</li>`)}</ul>`}
    <a href=${address(`requests/${answer.requestId}`)}>${answer.requestId}</a>
  </details>`;
}
