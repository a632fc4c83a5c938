// What opens over every page by a key: the search and the list of shortcuts. Their module is loaded with the first use.
import { html, signal, useEffect } from "./parts/html.js";
import { attempt } from "./parts/notices.js";
import { caller } from "./session.js";

/** What is open: "search", "shortcuts" or "". */
const shown = signal("");
/** @type {import("@preact/signals").Signal<any>} */
const overlay = signal(null);

/** @param {"search" | "shortcuts"} name */
export const show = (name) =>
  void attempt(async () => {
    overlay.value ??= await import("./search.js").catch(() => Promise.reject(new Error("The search could not be loaded. Reload the page.")));
    shown.value = name;
  });

/** @param {KeyboardEvent} event */
function onKeyDown(event) {
  const { key, ctrlKey, metaKey, shiftKey, altKey, target } = event;
  if (event.defaultPrevented || altKey || !caller.value?.authenticated || document.querySelector("dialog[open]")) return;
  const isTyping = target instanceof Element && target.matches("input, textarea, select");
  if ((ctrlKey || metaKey) && !shiftKey && key.toLowerCase() === "k") show("search");
  else if (key === "?" && !isTyping && !ctrlKey && !metaKey) show("shortcuts");
  else return;
  event.preventDefault();
}

export function Overlays() {
  useEffect(() => {
    addEventListener("keydown", onKeyDown);
    return () => removeEventListener("keydown", onKeyDown);
  }, []);
  const close = () => (shown.value = "");
  if (!overlay.value || !caller.value?.authenticated) return null;
  if (shown.value === "search") return html`<${overlay.value.Search} onClose=${close} onShortcuts=${() => show("shortcuts")} />`;
  return shown.value === "shortcuts" && html`<${overlay.value.Shortcuts} onClose=${close} />`;
}
