// Whether a message fits the context of its models: counted by their tokenizers before it is sent.
import { html, useEffect, useState } from "../parts/html.js";
import { post } from "../api.js";
import { bodyOf, newId, revisionOf } from "./chat_conversation.js";
import { models } from "./chat_models.js";

/** @typedef {import("./chat_conversation.js").Conversation} Conversation */
/** @typedef {import("./chat_conversation.js").Attachment} Attachment */
/** @typedef {{model: string, tokens: number, context: number, files: [string, number][], isPartial: boolean}} Fit
 * `files`: the tokens of each text file. `isPartial`: pictures and recordings are not counted. */

/** A shorter message without files is not counted. */
const MIN_CHARS = 2000;
const DEBOUNCE_MILLISECONDS = 400;

/** @param {number} number */
const exact = (number) => number.toLocaleString("en");

/** Counts what one model would read. @param {Conversation} conversation with the message as its last turn
 * @param {number} column @param {AbortSignal} signal @returns {Promise<Fit>} */
async function fitOf(conversation, column, signal) {
  const { model, messages } = bodyOf(conversation, column, conversation.turns.length - 1);
  const isPartial = messages.some((/** @type {any} */ { content }) => typeof content !== "string");
  const texts = messages.map((/** @type {any} */ { role, content }) => ({ role, content: typeof content === "string" ? content : textsOf(content) }));
  const countOf = (/** @type {object} */ body) => post("/v1/tokenize", { model, ...body }, { signal });
  const files = conversation.turns.at(-1)?.attachments.filter((file) => file.kind === "text") ?? [];
  const [whole, ...each] = await Promise.all([countOf({ messages: texts }), ...files.map(({ data }) => countOf({ content: data }))]);
  const context = whole.max_model_len ?? modelOf(model)?.contextTokens ?? 0;
  return { model, tokens: whole.count, context, isPartial, files: files.map(({ name }, number) => [name, each[number].count]) };
}

/** @param {any[]} content */
const textsOf = (content) => content.map(({ text }) => text ?? "").join("");

/** @param {string} id */
const modelOf = (id) => models.value?.find((model) => model.id === id);
/** Whether a model counts, as far as is known. @param {string} id */
const counts = (id) => modelOf(id)?.countsTokens ?? false;
/** Whether a model counts without being loaded for it. @param {string} id */
const isLoaded = (id) => modelOf(id)?.status === "active";

/** What a message takes of the context of each model, once it has files or is long; nothing where a model does not count.
 * @param {{conversation: Conversation, text: string, files: Attachment[]}} props */
export function Fits({ conversation, text, files }) {
  revisionOf(conversation);
  const [fits, setFits] = useState(/** @type {Fit[]} */ ([]));
  const isCounted = files.length > 0 || text.length >= MIN_CHARS;
  const counting = conversation.models.filter(counts);
  const asleep = counting.filter((model) => !isLoaded(model));
  useEffect(() => {
    setFits([]);
    if (!isCounted) return undefined;
    const abort = new AbortController();
    const turns = [...conversation.turns, { id: newId("turn-"), text, attachments: files, answers: [] }];
    const count = async () => {
      const counted = await Promise.allSettled(
        conversation.models.flatMap((model, column) => (counts(model) && isLoaded(model) ? [fitOf({ ...conversation, turns }, column, abort.signal)] : [])),
      );
      if (!abort.signal.aborted) setFits(counted.flatMap((each) => (each.status === "fulfilled" && each.value.context ? [each.value] : [])));
    };
    const timer = setTimeout(() => void count(), DEBOUNCE_MILLISECONDS);
    return () => {
      clearTimeout(timer);
      abort.abort();
    };
  }, [isCounted && text, files, conversation.models, conversation.turns.length, conversation.options.system, counting.join(" "), asleep.join(" ")]);
  return html`<div class="fits" role="status">${fits.map((fit) => html`<${FitLine} key=${fit.model} fit=${fit} />`)}
    ${isCounted && asleep.map((model) => html`<p key=${model} class="faint"><bdi>${model}</bdi> is not loaded, so its tokens are not counted.</p>`)}</div>`;
}

/** @param {{fit: Fit}} props */
function FitLine({ fit: { model, tokens, context, files, isPartial } }) {
  const parts = files.map(([name, number]) => `${name}: ${exact(number)}`).join(", ");
  const without = isPartial ? " without images and recordings" : "";
  return tokens > context
    ? html`<p class="problem">The message does not fit <bdi>${model}</bdi>: the conversation has ${exact(tokens)} tokens${without}, the context ${exact(context)}.${parts && ` ${parts}.`}</p>`
    : html`<p class="faint"><bdi>${model}</bdi>: ${exact(tokens)} of ${exact(context)} tokens${without}.${parts && ` ${parts}.`}</p>`;
}
