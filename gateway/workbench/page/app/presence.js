// Whether this tab is in sight: one that is hidden, or left for another address, keeps no stream open. A browser opens six connections to a
// host, and keeps those of pages that it may come back to.
import { signal } from "@preact/signals";

/** A tab that is hidden for less keeps its streams. */
const GRACE_MILLISECONDS = 5000;

export const isPresent = signal(!document.hidden);
let timer = 0;

/** @param {boolean} value */
function set(value) {
  clearTimeout(timer);
  isPresent.value = value;
}

addEventListener("visibilitychange", () => {
  if (!document.hidden) return set(true);
  clearTimeout(timer);
  timer = setTimeout(() => set(false), GRACE_MILLISECONDS);
});
addEventListener("pagehide", () => set(false));
addEventListener("pageshow", () => set(!document.hidden));

/** Does something that keeps a connection open, with a signal that aborts as soon as this tab is not in sight; begins once it is.
 * Returns undefined where it was aborted. @template T
 * @param {(signal: AbortSignal) => Promise<T>} work @param {AbortSignal} [signal] that ends it too @returns {Promise<T | undefined>} */
export async function whilePresent(work, signal) {
  const abort = new AbortController();
  const end = () => abort.abort();
  await untilPresent(signal);
  if (signal?.aborted) return undefined;
  signal?.addEventListener("abort", end);
  const stop = isPresent.subscribe((is) => void (is || end()));
  try {
    return await work(abort.signal);
  } catch (error) {
    if (!abort.signal.aborted) throw error;
    return undefined;
  } finally {
    stop();
    signal?.removeEventListener("abort", end);
  }
}

/** Waits until this tab is in sight. @param {AbortSignal} [signal] that ends the wait @returns {Promise<void>} */
function untilPresent(signal) {
  return new Promise((resolve) => {
    if (signal?.aborted) return resolve();
    const done = () => {
      signal?.removeEventListener("abort", done);
      // It is called before it has `stop`, if this tab is in sight.
      queueMicrotask(() => stop());
      resolve();
    };
    signal?.addEventListener("abort", done);
    const stop = isPresent.subscribe((is) => void (is && done()));
  });
}
