// What an engine prints, as it comes: the last lines, then each new one.
import { ApiError, events, segment } from "../api.js";
import { whilePresent } from "../presence.js";
import { html, useEffect, useLayoutEffect, useRef, useState } from "./html.js";
import { ErrorNote } from "./widgets.js";
import { EndFollower } from "./end_follower.js";

/** From where on a box counts as scrolled to its end. */
const END_PIXELS = 8;

const FIRST_LINES = 200;
/** Lines that are kept; older ones go. */
const MAX_LINES = 2000;
const RETRY_MILLISECONDS = 2000;
/** New lines are drawn at most this often. */
const DRAW_MILLISECONDS = 100;

/** @typedef {{lines: string[], error: unknown, isOpen: boolean}} LogState */

/** Follows the output of a model's engine for as long as it is shown. @param {string} model */
function useLog(model) {
  const [log, setLog] = useState(/** @type {LogState} */ ({ lines: [], error: null, isOpen: false }));
  useEffect(() => {
    const abort = new AbortController();
    /** @type {string[]} */
    let lines = [];
    let timer = 0;
    const draw = () => {
      timer ||= setTimeout(() => {
        timer = 0;
        setLog({ lines: [...lines], error: null, isOpen: true });
      }, DRAW_MILLISECONDS);
    };
    const follow = async (/** @type {AbortSignal} */ signal) => {
      lines = [];
      for await (const { data } of events("GET", `/v1/admin/models/${segment(model)}/logs`, { query: { follow: 1, lines: FIRST_LINES }, signal })) {
        if (data) {
          const batch = JSON.parse(data);
          if (batch.error) throw new ApiError(0, batch.error);
          if (batch.lostLineCount) lines.push(`… ${batch.lostLineCount} lines were lost, because they arrived too fast …`);
          lines = [...lines, ...batch.lines].slice(-MAX_LINES);
        }
        draw();
      }
    };
    const run = async () => {
      while (!abort.signal.aborted) {
        await whilePresent(follow, abort.signal).catch((error) => abort.signal.aborted || setLog((before) => ({ ...before, error, isOpen: false })));
        await new Promise((resolve) => setTimeout(resolve, RETRY_MILLISECONDS));
      }
    };
    setLog({ lines: [], error: null, isOpen: false });
    void run();
    return () => {
      abort.abort();
      clearTimeout(timer);
    };
  }, [model]);
  return log;
}

/** @param {{model: string}} props */
export function EngineLog({ model }) {
  const { lines, error, isOpen } = useLog(model);
  const box = useRef(/** @type {HTMLElement | null} */ (null));
  const end = useRef(new EndFollower(END_PIXELS));
  useLayoutEffect(() => {
    if (box.current) end.current.grown(box.current);
  }, [lines]);
  const onScroll = () => box.current && end.current.scrolled(box.current);
  return html`<${ErrorNote} error=${error} />
    <pre class="log" ref=${box} tabindex="0" role="log" aria-label=${`Engine log of ${model}`} onScroll=${onScroll}>${lines.length ? lines.join("\n") : html`<span class="faint">${isOpen ? "The log is empty." : "…"}</span>`}</pre>`;
}
