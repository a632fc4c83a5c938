// What a task waits for between two attempts: which one failed, why, and when the next one starts.
import { useNow } from "./use_now.js";

/** @typedef {{error: {message: string}, next_at?: string | null, failed: number}} Retry `failed`: attempts that count; others were lost. */

/** @param {Retry} retry @param {number} most @param {number} now */
export function retryText({ error, next_at: at, failed }, most, now) {
  const left = at ? Math.ceil((Date.parse(at) - now) / 1000) : 0;
  const what = failed ? `Attempt ${failed} of ${most} failed` : "The attempt was lost";
  return `${what}: ${error.message.replace(/\.$/, "")}. ${left > 0 ? `Next try in ${left} s.` : "The next try starts with a free slot."}`;
}

/** @param {{retry: Retry, most: number}} props */
export const RetryText = ({ retry, most }) => retryText(retry, most, useNow(true));
