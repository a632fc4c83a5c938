// What a task waits for between two attempts: which one failed, why, and when the next one starts.
import { html } from "./html.js";
import { useNow } from "./use_now.js";

/** @typedef {{error: {message: string}, next_at: string | null, failed: number}} Retry `failed`: attempts that count; others were lost. */

/** @param {{retry: Retry, most: number}} props */
export function RetryText({ retry: { error, next_at: at, failed }, most }) {
  const now = useNow(true);
  const left = at ? Math.ceil((Date.parse(at) - now) / 1000) : 0;
  const what = failed ? `Attempt ${failed} of ${most} failed` : "The attempt was lost";
  return html`${what}: ${error.message.replace(/\.$/, "")}. ${left > 0 ? `Next try in ${left} s.` : "The next try starts with a free slot."}`;
}
