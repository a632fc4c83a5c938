// An answer from its request to its receipt: as a task where that is possible, else as a stream that ends with the page.
import { ApiError, get, segment } from "../api.js";
import { whilePresent } from "../presence.js";
import { touch } from "./chat_conversation.js";
import { show, stream } from "./chat_stream.js";
import { cancel, canBeDurable, follow, submit } from "./chat_task.js";

/** @typedef {import("./chat_conversation.js").Answer} Answer */

/** How often the receipt of a request that has ended is asked for, and how long between. */
const RECEIPT_TRIES = 6;
const RECEIPT_MILLISECONDS = 250;
const CLIENT = "weft-workbench";

/** Asks for an answer, or follows one that was asked for, and fills it as it comes. Raises nothing: what went wrong is in the answer.
 * @param {Answer} answer @param {Record<string, any>} body @param {Record<string, string>} about what its task says of it, with the
 * id of the conversation @param {AbortSignal} signal @param {() => void} accepted called once the mesh has accepted it or cannot make it durable */
export async function ask(answer, body, about, signal, accepted) {
  const pace = new Pace(answer);
  const changed = () => pace.changed();
  const headers = { "X-Client-Id": CLIENT, "X-Session-Id": about.conversation };
  try {
    if (!answer.isSubmitted) {
      if (canBeDurable(body)) await submit(answer, body, headers, about);
      answer.isSubmitted = true;
      accepted();
      if (signal.aborted && answer.taskId) await cancel(answer);
    }
    if (answer.taskId) await follow(answer, changed);
    else await stream(answer, body, { ...headers, "X-Request-Id": answer.requestId }, signal, changed);
  } catch (error) {
    // A task continues without a key that may follow it.
    if (answer.taskId && error instanceof ApiError && error.status === 401) return;
    // A page that is left ends its streams: it is said of the answer when somebody opens it again.
    if (!answer.taskId) await whilePresent(async () => {}, signal);
    answer.state = signal.aborted && !answer.taskId ? "stopped" : "failed";
    if (answer.state === "failed") answer.error = errorOf(error);
  } finally {
    show(answer, "");
    pace.end();
  }
}

/** @param {unknown} error */
function errorOf(error) {
  if (error instanceof ApiError) return { message: error.message, code: error.code };
  return { message: error instanceof SyntaxError ? "An event of the answer is not valid JSON." : "The connection was lost.", code: "" };
}

/** Asks for the receipt of an answer that has ended: the mesh may write it a moment later. @param {Answer} answer */
export async function fetchReceipt(answer) {
  const found = await soughtReceipt(answer.requestId);
  if (found) answer.receipt = found;
  answer.isReceiptSought = true;
  touch(answer);
}

/** @param {string} requestId */
async function soughtReceipt(requestId) {
  for (let tries = 0; tries < RECEIPT_TRIES; tries += 1) {
    try {
      const found = await get(`/v1/requests/${segment(requestId)}`);
      if (found.state === "ended") return found;
    } catch (error) {
      if (error instanceof ApiError && error.status === 403) return null;
    }
    await new Promise((resolve) => setTimeout(resolve, RECEIPT_MILLISECONDS * (tries + 1)));
  }
  return null;
}

/** Shows a growing answer at most once per frame, and less often where drawing it takes long. */
class Pace {
  /** @param {Answer} answer */
  constructor(answer) {
    this.answer = answer;
    this.isWaiting = false;
    this.hasEnded = false;
    this.next = 0;
  }

  changed() {
    if (this.isWaiting) return;
    this.isWaiting = true;
    const wait = this.next - performance.now();
    // A hidden tab draws no frames.
    if (document.hidden || wait > 16) setTimeout(() => this.draw(), Math.max(wait, document.hidden ? 200 : 0));
    else requestAnimationFrame(() => this.draw());
  }

  draw() {
    this.isWaiting = false;
    if (this.hasEnded) return;
    const begun = performance.now();
    touch(this.answer);
    // After the work that this frame is for: elements, layout.
    setTimeout(() => (this.next = performance.now() + 2 * (performance.now() - begun)), 0);
  }

  end() {
    this.hasEnded = true;
    touch(this.answer);
  }
}
