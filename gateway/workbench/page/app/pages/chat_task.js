// A durable answer: a task of the mesh, followed by its id from any browser until it has ended.
import { ApiError, events, get, post, remove, segment } from "../api.js";
import { isPresent, whilePresent } from "../presence.js";
import { can } from "../session.js";
import { isRunning, prefixParts, touch } from "./chat_conversation.js";
import { leadsToAgent, models, refreshModels } from "./chat_models.js";
import { arrived, beginAgain } from "./chat_pace.js";
import { append, facts, show, takeCall, takeTool, waitSeconds } from "./chat_stream.js";

/** @typedef {import("./chat_conversation.js").Answer} Answer */

const PATH = "/api/v1/inference-tasks";
const RETRY_MILLISECONDS = [250, 500, 1000, 2000];
const POSITION_MILLISECONDS = 1000;
/** How often an answer without a stream is asked for. */
const POLL_MILLISECONDS = 1000;
/** Streams of answers that all tabs of a browser have at a time: of its six connections to a host one is for the state of the mesh, and
 * one stays free. */
const STREAMS = 4;
const SUBMIT_TRIES = 3;
const MAX_ATTEMPTS = 2;
const SUBMIT_MILLISECONDS = 1000;
/** Refusals of a task after which a request that is not durable may still be answered. */
const NOT_DURABLE = new Set([413, 429, 501]);
/** How a submission ends whose task the mesh may have: no answer, or none in time. */
const UNKNOWN = new Set([0, 502, 503, 504]);
const ENDED = ["completed", "cancelled", "failed"];
const AWAY = "The mesh does not answer. Trying again…";

/** @param {number} milliseconds */
const pause = (milliseconds) => new Promise((resolve) => setTimeout(resolve, milliseconds));

/** Whether an answer can be a task: its key may follow and cancel tasks, and its model has a name.
 * @param {Record<string, any>} body */
export const canBeDurable = (body) => body.model !== "auto" && can("inference:view") && can("inference:edit");

/** Submits the request of an answer; repeated, it is the same task. Without a `taskId` afterwards only a request that is not
 * durable may be answered.
 * @param {Answer} answer @param {Record<string, any>} body @param {Record<string, string>} headers @param {Record<string, string>} metadata */
export async function submit(answer, body, headers, metadata) {
  const { stream, stream_options, ...asked } = body;
  if (models.value === null) await refreshModels();
  // Somebody waits. Only its user lets an agent use its tools again.
  const attempts = leadsToAgent(body.model) ? 1 : MAX_ATTEMPTS;
  for (let tries = 1; ; tries += 1) {
    try {
      const options = { headers: { ...headers, "Idempotency-Key": answer.id, "X-Priority": "normal" } };
      answer.taskId = answer.requestId = (await post(PATH, { body: { ...asked, metadata }, max_attempts: attempts }, options)).id;
      return;
    } catch (error) {
      if (!(error instanceof ApiError)) throw error;
      if (NOT_DURABLE.has(error.status)) return;
      if (error.status === 503 && tries === SUBMIT_TRIES) return;
      if (!UNKNOWN.has(error.status) || tries === SUBMIT_TRIES) throw new ApiError(error.status, { ...error, message: error.message.replace(/^body\./, "") });
    }
    await pause(SUBMIT_MILLISECONDS);
  }
}

/** Stops a task wherever it runs. @param {Answer} answer */
export const cancel = (answer) => post(`${PATH}/${segment(answer.taskId)}/cancel`);

/** Deletes tasks; those that run are cancelled before. Returns how many remain. @param {Iterable<string>} ids */
export async function forgetTasks(ids) {
  let remaining = 0;
  for (const id of ids) {
    const path = `${PATH}/${segment(id)}`;
    try {
      await remove(path);
      await remove(path, { query: { forget: true } });
    } catch (error) {
      if (!(error instanceof ApiError && error.status === 404)) remaining += 1;
    }
  }
  return remaining;
}

/** Fills an answer from its task until that has ended. Raises ApiError where it cannot be followed.
 * @param {Answer} answer @param {() => void} changed */
export async function follow(answer, changed) {
  const path = `${PATH}/${segment(answer.taskId)}`;
  let status = AWAY;
  const timer = setInterval(() => void showPosition(answer, changed), POSITION_MILLISECONDS);
  try {
    for (let failures = 0; ; failures += 1) {
      let answers = false;
      const read = () => {
        failures = 0;
        status = AWAY;
        changed();
      };
      try {
        // A hidden tab waits for the end, which sends the next message.
        if (isPresent.value || ENDED.includes((await get(path)).state)) answers = await inTurn((isBrief) => readEvents(answer, `${path}/events`, isBrief, read));
        else answers = true;
      } catch (error) {
        if (error instanceof ApiError && error.status && error.status < 500) {
          // As many as may follow tasks do.
          if (error.status !== 429) throw error;
          status = error.message;
        }
      }
      if (!isRunning(answer)) return;
      if (!answers) show(answer, status);
      changed();
      await pause(answers ? POLL_MILLISECONDS : RETRY_MILLISECONDS[Math.min(failures, RETRY_MILLISECONDS.length - 1)]);
    }
  } finally {
    clearInterval(timer);
  }
}

/** Does something with one of the streams of answers, or without one where all are taken. @template T
 * @param {(isBrief: boolean) => Promise<T>} work @returns {Promise<T>} */
async function inTurn(work) {
  for (let number = 0; navigator.locks && number < STREAMS; number += 1) {
    const done = await navigator.locks.request(`weft.answer ${number}`, { ifAvailable: true }, async (lock) => lock && { value: await work(false) });
    if (done) return done.value;
  }
  return work(Boolean(navigator.locks));
}

/** Reads the events of an answer to its end; false: they ended before. A tab that is not in sight any more stops.
 * @param {Answer} answer @param {string} path @param {boolean} isBrief only what is there already @param {() => void} changed */
async function readEvents(answer, path, isBrief, changed) {
  // Up to where this connection repeats what came before it.
  let repeated = Infinity;
  const read = async (/** @type {AbortSignal | undefined} */ signal) => {
    for await (const { event, data } of events("GET", path, { query: { after: answer.lastEvent || undefined }, signal })) {
      if (!data) continue;
      const body = JSON.parse(data);
      if (event === "output") takeOutput(answer, body, body.last_event > repeated);
      else if (event === "task") {
        repeated = Math.min(repeated, body.last_event);
        takeTask(answer, body);
      } else throw new ApiError(0, body.error ?? {});
      changed();
      if (!isRunning(answer) || (isBrief && answer.lastEvent >= repeated)) return true;
    }
    return false;
  };
  return isPresent.value ? ((await whilePresent(read)) ?? true) : read(undefined);
}

/** @param {Answer} answer @param {any} task */
function takeTask(answer, task) {
  const { state, error, last_event: last, waiting_for: reason, attempt, retry, max_attempts: most } = task;
  // A task that has ended is sent before its last pieces, and again after them.
  if (ENDED.includes(state) && last > answer.lastEvent) return;
  show(answer, "");
  answer.retry = state === "pending" && retry ? { ...retry, most } : undefined;
  if (state === "pending") {
    if (answer.parts.at(-1)?.kind !== "lost") lose(answer);
    answer.state = "waiting";
    if (reason) show(answer, `Waiting: ${reason}`);
  } else if (state === "completed") answer.state = "complete";
  else if (state === "cancelled") answer.state = "stopped";
  else if (state === "failed") Object.assign(answer, { state, error: { message: error.message, code: error.code } });
  else if (attempt !== answer.attempt) lose(answer);
}

/** What an attempt that was lost had answered stays in sight: the next attempt begins again. @param {Answer} answer */
function lose(answer) {
  beginAgain(answer);
  const at = answer.parts.findLastIndex((part) => part.kind === "lost") + 1;
  const begun = prefixParts(answer.prefix);
  const parts = answer.parts.slice(at);
  const text = parts.map((part) => (part.kind === "text" || part.kind === "thinking" ? part.text : "")).join("");
  if (parts.length === begun.length && text === (answer.prefix ?? "")) return;
  /** @type {import("./chat_conversation.js").Part} */
  const lost = { kind: "lost", text, why: "" };
  answer.parts.splice(at, Infinity, lost, ...begun);
  get(`${PATH}/${segment(answer.taskId)}`).then(
    ({ attempts }) => {
      const failed = attempts.findLast((/** @type {any} */ each) => each.error);
      lost.why = failed ? `attempt ${failed.attempt}: ${failed.error.message}` : "";
      touch(answer);
    },
    () => {},
  );
}

/** @param {Answer} answer @param {any} output @param {boolean} isLive */
function takeOutput(answer, { attempt, last_event: last, events: pieces = [] }, isLive) {
  if (attempt !== answer.attempt) lose(answer);
  answer.attempt = attempt;
  answer.lastEvent = last;
  for (const piece of pieces) takeEvent(answer, piece, isLive);
}

/** One event of the mesh, as its JSON of protobuf. @param {Answer} answer @param {any} event @param {boolean} isLive */
function takeEvent(answer, { delta, progress, usage, finished, tool_call: call, tool_result: result, signal, warning }, isLive) {
  if (progress && answer.state === "waiting") {
    const [done, all] = [Number(progress.processed_tokens ?? 0), Number(progress.prompt_tokens ?? 0)];
    show(answer, `Processing the prompt: ${done}/${all} tokens`, all ? done / all : null);
  }
  if (usage) {
    answer.usage = {
      prompt_tokens: Number(usage.prompt_tokens ?? 0),
      completion_tokens: Number(usage.completion_tokens ?? 0),
      prompt_tokens_details: { cached_tokens: Number(usage.cached_prompt_tokens ?? 0) },
    };
  }
  if (finished) answer.facts = facts(finished.receipt ?? {});
  if (call) takeTool(answer, { tool_call: { ...call, arguments: objectOf(call.arguments) } });
  if (result) takeTool(answer, { tool_result: result });
  if (signal) takeTool(answer, { signal: { ...signal, arguments: objectOf(signal.arguments) } });
  if (warning) takeTool(answer, { warning: { ...warning, code: nameOf(warning.code, "WARNING_CODE_") } });
  if (delta) takeDelta(answer, delta, isLive);
}

/** @param {Answer} answer @param {any} delta @param {boolean} isLive */
function takeDelta(answer, { text, reasoning, refusal, tool_calls: calls = [], finish_reason: reason }, isLive) {
  answer.state = "streaming";
  show(answer, "");
  if (reasoning) append(answer, "thinking", reasoning);
  if (text) append(answer, "text", text);
  if (refusal) append(answer, "text", refusal);
  for (const { index = 0, name, arguments_text: written } of calls) takeCall(answer, { index, function: { name, arguments: written } });
  if (text || reasoning || refusal || calls.length) arrived(answer, isLive);
  if (reason) answer.finishReason = nameOf(reason, "FINISH_REASON_");
}

/** @param {string} value of an enum @param {string} prefix */
const nameOf = (value = "", prefix) => value.replace(prefix, "").toLowerCase();

/** The object that a JsonObject message stands for. @param {any} [message] @returns {any} */
const objectOf = ({ fields = [] } = {}) => Object.fromEntries(fields.map((/** @type {any} */ field) => [field.name ?? "", valueOf(field.value)]));

/** @param {any} [value] of a JsonValue message @returns {any} */
function valueOf(value = {}) {
  const [kind, given] = Object.entries(value)[0] ?? ["null_value", null];
  if (kind === "null_value") return null;
  if (kind === "integer_value") return Number(given);
  if (kind === "array_value") return (given.values ?? []).map(valueOf);
  return kind === "object_value" ? objectOf(given) : given;
}

/** Shows the place in the queue or the progress of the load that a pending answer waits for.
 * @param {Answer} answer @param {() => void} changed */
async function showPosition(answer, changed) {
  if (!isPresent.value || answer.state !== "waiting" || answer.status === AWAY) return;
  try {
    const { queued, loading } = await get(`/v1/requests/${segment(answer.taskId)}`);
    if (answer.state !== "waiting" || answer.status === AWAY || !(queued ?? loading)) return;
    const { etaSeconds: eta } = queued ?? loading;
    const about = eta === undefined ? "" : `, about ${waitSeconds(eta)}`;
    if (loading) show(answer, `Loading the model${about}${loading.stage && `: ${loading.stage}`}`, loading.progress ?? null);
    else if (queued.position) show(answer, `Waiting, position ${queued.position}${about}${queued.reason && `: ${queued.reason}`}`);
    changed();
  } catch {
    // It is not offered to a runner now: the task itself has the reason.
  }
}
