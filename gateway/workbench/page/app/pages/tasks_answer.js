// The answer of a task: its text while it comes, and the result of its endpoint once it is complete.
import { html } from "../parts/html.js";
import { Code, Facts } from "../parts/widgets.js";
import { count } from "../parts/format.js";

/** @param {{task: any, text: string, reasoning: string}} props */
export function Answer({ task, text, reasoning }) {
  const { result } = task;
  if (!result) {
    if (text || reasoning) return html`<${Texts} reasoning=${reasoning} texts=${[text]} />`;
    const words = { pending: "Not started.", running: "Nothing yet.", completed: "Loading…" };
    return html`<p class="faint">${words[/** @type {keyof typeof words} */ (task.state)] ?? "No answer."}</p>`;
  }
  return html`<${Texts} reasoning=${reasoningOf(result)} texts=${textsOf(result)} />
    <${Facts} facts=${usageOf(result)} />
    <details><summary>Complete answer as JSON</summary><${Code} label="Complete answer" text=${JSON.stringify(result, null, 2)} /></details>`;
}

/** @param {{reasoning: string, texts: string[]}} props */
function Texts({ reasoning, texts }) {
  return html`${reasoning && html`<details><summary>Thinking</summary><div class="answer faint">${reasoning}</div></details>`}
    ${texts.filter(Boolean).map((text, at) => html`<div key=${at} class="answer" role="group" aria-label=${texts.length > 1 ? `Choice ${at + 1}` : "Answer"}>${text}</div>`)}`;
}

/** The texts of an answer of any endpoint: one for each choice. @param {any} result @returns {string[]} */
export function textsOf(result) {
  if (result.object === "list") return [`${result.data.length} vectors of ${vectorLength(result.data[0])} numbers`];
  if (result.output) {
    const parts = result.output.flatMap((/** @type {any} */ item) => item.content ?? []);
    return [parts.map((/** @type {any} */ part) => part.text ?? "").join("")];
  }
  return (result.choices ?? []).map((/** @type {any} */ choice) => choice.text ?? choice.message?.content ?? calls(choice.message));
}

/** @param {any} message */
function calls(message) {
  return (message?.tool_calls ?? []).map((/** @type {any} */ call) => `${call.function?.name}(${call.function?.arguments})`).join("\n");
}

/** @param {any} result */
const reasoningOf = (result) => (result.choices ?? []).map((/** @type {any} */ choice) => choice.message?.reasoning_content ?? "").join("");

/** @param {any} entry */
const vectorLength = (entry) => (Array.isArray(entry?.embedding) ? entry.embedding.length : "?");

/** @param {any} result @returns {[string, any][]} */
function usageOf({ model, usage = {}, choices = [] }) {
  return [
    ["Model", model],
    ["Tokens in", count(usage.prompt_tokens ?? usage.input_tokens)],
    ["Cached tokens", count(usage.prompt_tokens_details?.cached_tokens ?? usage.input_tokens_details?.cached_tokens)],
    ["Tokens out", count(usage.completion_tokens ?? usage.output_tokens)],
    ["Finish reason", choices[0]?.finish_reason],
  ];
}
