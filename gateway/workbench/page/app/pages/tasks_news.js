// News of durable work, from the tasks in the stream of the mesh.
import { useEffect, useRef } from "../parts/html.js";
import { collection, useLive } from "../live.js";

/** What is asked again waits for as long, so that many changes are one question. */
const PAUSE_MILLISECONDS = 500;
/** How often unfinished work is asked for that has no news: what is written after the last line of a batch has ended. */
const FOLLOW_MILLISECONDS = 1000;

/** Asks again soon after tasks have begun, changed or ended, and for as long as something is followed.
 * @param {() => Promise<unknown>} refresh @param {boolean} [isFollowed] */
export function useTaskNews(refresh, isFollowed = false) {
  useLive("task");
  const live = collection("task").value;
  const known = useRef(/** @type {Map<string, any> | null} */ (null));
  const timer = useRef(/** @type {ReturnType<typeof setTimeout> | undefined} */ (undefined));
  const newest = useRef({ refresh, isFollowed });
  newest.current = { refresh, isFollowed };
  const plan = (/** @type {number} */ pause) => {
    timer.current ??= setTimeout(async () => {
      // News that come while it is asked are asked for again.
      timer.current = undefined;
      await newest.current.refresh();
      if (newest.current.isFollowed) plan(FOLLOW_MILLISECONDS);
    }, pause);
  };
  useEffect(() => {
    const before = known.current;
    if (live.isComplete) known.current = live.items;
    const isOther = before && (before.size !== live.items.size || [...live.items].some(([name, task]) => before.get(name) !== task));
    if (isOther) plan(PAUSE_MILLISECONDS);
  }, [live]);
  useEffect(() => {
    if (isFollowed) plan(FOLLOW_MILLISECONDS);
  }, [isFollowed]);
  useEffect(
    () => () => {
      newest.current = { refresh: async () => {}, isFollowed: false };
      clearTimeout(timer.current);
    },
    [],
  );
}
