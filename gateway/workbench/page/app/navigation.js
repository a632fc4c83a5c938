// The address of the page as a signal, links within it, and the theme.
import { signal } from "@preact/signals";
import { ROOT } from "./mesh.js";

const BASE = `${ROOT}/ui/`;

/** The path below /ui/, such as "requests/req-1", and its query. */
export const place = signal(readPlace());

function readPlace() {
  const path = location.pathname.startsWith(BASE) ? location.pathname.slice(BASE.length) : "";
  return { path: path.split("/").map(decoded).join("/").replace(/\/+$/, ""), query: new URLSearchParams(location.search) };
}

/** A segment of an address that somebody typed may be no text. @param {string} segment */
function decoded(segment) {
  try {
    return decodeURIComponent(segment);
  } catch {
    return segment;
  }
}

addEventListener("popstate", () => (place.value = readPlace()));

/** The address of a page. @param {string} path @param {Record<string, string>} [query] */
export function address(path, query = {}) {
  const text = new URLSearchParams(Object.entries(query).filter(([, value]) => value)).toString();
  return BASE + path.split("/").map(encodeURIComponent).join("/") + (text ? `?${text}` : "");
}

/** Goes to another page. @param {string} path @param {Record<string, string>} [query] @param {{replace?: boolean}} [how] */
export function go(path, query = {}, { replace = false } = {}) {
  history[replace ? "replaceState" : "pushState"](null, "", address(path, query));
  place.value = readPlace();
}

/** Follows links within the page without loading it again. @param {MouseEvent} event */
export function followLink(event) {
  const link = event.target instanceof Element ? event.target.closest("a") : null;
  const isPlain = event.button === 0 && !event.metaKey && !event.ctrlKey && !event.shiftKey && !event.altKey;
  if (!link || !isPlain || event.defaultPrevented || link.target || link.hasAttribute("download")) return;
  if (link.origin !== location.origin || !link.pathname.startsWith(BASE)) return;
  if (link.hash && link.pathname === location.pathname) return;
  event.preventDefault();
  history.pushState(null, "", link.href);
  place.value = readPlace();
  // As after a page that was loaded: its beginning is shown, and the next Tab goes to its first control.
  scrollTo(0, 0);
  document.getElementById("main")?.focus({ preventScroll: true });
}

const THEME = "weft.theme";
/** "", "light" or "dark"; empty: as the system. */
export const theme = signal(localStorage.getItem(THEME) ?? "");

/** @param {string} [chosen] */
export function applyTheme(chosen = theme.value) {
  theme.value = chosen;
  if (chosen) localStorage.setItem(THEME, chosen);
  else localStorage.removeItem(THEME);
  document.documentElement.dataset.theme = chosen;
}
