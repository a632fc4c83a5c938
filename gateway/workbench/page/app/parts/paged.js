// Lists that come in pages, the newest first: the pages that were asked for, and a first page that is asked for again.
import { html, useCallback, useEffect, useRef, useState } from "./html.js";
import { comebacks } from "../live.js";
import { ErrorNote } from "./widgets.js";

/**
 * @typedef {{items: any[], next: string}} ListPage
 * A page, and how the one after it is asked for; empty: it is the last one.
 * @typedef {{
 *   rows: any[], next: string, isComplete: boolean, isBusy: boolean, error: unknown,
 *   more: () => Promise<void>, refresh: () => Promise<void>, drop: (id: string) => void, replace: (row: any) => void,
 * }} PagedList
 */

/** @type {{rows: any[], next: string, isComplete: boolean, isBusy: boolean, error: unknown}} */
const NOTHING = { rows: [], next: "", isComplete: false, isBusy: false, error: null };

/** The rows of a list, which have an `id`. `load` asks for a page of some size after a mark, "" for the first one.
 * @param {(after: string, size: number) => Promise<ListPage>} load @param {string} key What is listed: another one is another list.
 * @param {{size: number, most: number}} pages How many rows a page has, and how many it may have: what is shown is asked for again as one page.
 * @returns {PagedList} */
export function usePages(load, key, { size, most }) {
  const [state, setState] = useState(NOTHING);
  const turn = useRef(0);
  const isRefreshing = useRef(false);
  const isDue = useRef(false);
  const shown = useRef(0);
  shown.current = state.rows.length;

  /** @param {string} after @param {number} length @param {(old: typeof state, page: ListPage) => Partial<typeof state>} put */
  const ask = async (after, length, put) => {
    const own = turn.current;
    setState((old) => ({ ...old, isBusy: true }));
    try {
      const page = await load(after, length);
      if (own === turn.current) setState((old) => ({ ...old, ...put(old, page), isComplete: true, isBusy: false, error: null }));
    } catch (error) {
      if (own === turn.current) setState((old) => ({ ...old, isBusy: false, error }));
    }
  };
  const more = () => ask(state.next, size, (old, page) => ({ rows: joined(old.rows, page.items), next: page.next }));
  const refresh = useCallback(async () => {
    // What changed while it is asked may be missing in the answer.
    isDue.current = isRefreshing.current;
    if (isRefreshing.current) return;
    isRefreshing.current = true;
    const own = turn.current;
    do {
      isDue.current = false;
      await ask("", Math.min(most, Math.max(size, shown.current)), begun);
    } while (isDue.current && own === turn.current);
    if (own === turn.current) isRefreshing.current = false;
  }, [key]);
  useEffect(() => {
    turn.current += 1;
    isRefreshing.current = false;
    setState(NOTHING);
    void refresh();
    return () => void (turn.current += 1);
  }, [key]);
  useEffect(() => void (comebacks.value && refresh()), [comebacks.value]);
  const drop = (/** @type {string} */ id) => setState((old) => ({ ...old, rows: old.rows.filter((row) => row.id !== id) }));
  const replace = (/** @type {any} */ row) =>
    setState((old) => ({ ...old, rows: old.rows.map((other) => (other.id === row.id ? row : other)) }));
  return { ...state, more, refresh, drop, replace };
}

/** The list with a new first page: what is older than it stays, what is gone from it is gone.
 * @param {{rows: any[], next: string}} old @param {ListPage} page */
function begun(old, page) {
  if (!page.next) return { rows: page.items, next: "" };
  const oldest = page.items[page.items.length - 1];
  const at = old.rows.findIndex((row) => row.id === oldest.id);
  return at < 0 ? { rows: page.items, next: page.next } : { rows: joined(page.items, old.rows.slice(at + 1)), next: old.rows.length > at + 1 ? old.next : page.next };
}

/** @param {any[]} first @param {any[]} then */
function joined(first, then) {
  const known = new Set(first.map((row) => row.id));
  return [...first, ...then.filter((row) => !known.has(row.id))];
}

/** Under a list: the error of the last question, and a button for the next page. @param {{list: PagedList}} props */
export function PageEnd({ list }) {
  return html`<${ErrorNote} error=${list.error} />
    ${!list.isComplete && !list.error && html`<p class="faint" role="status">Loading…</p>`}
    ${list.next && html`<p><button disabled=${list.isBusy} onClick=${list.more}>Show more</button></p>`}`;
}
