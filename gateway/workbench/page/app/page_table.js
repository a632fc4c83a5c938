// All pages: their path, title, group in the navigation, the right that they need, and their module. Where it says so,
// the gateway inserts those of extensions (page_files.py), with their icon and keyboard shortcuts.

/** @typedef {{path: string, title: string, group: string, needs: string, load: () => Promise<{Page: any}>, icon?: string, keys?: [string[], string][]}} PageEntry */

/** @type {PageEntry[]} */
export const PAGES = [
  { path: "", title: "Overview", group: "Use", needs: "models:view", load: () => import("./pages/overview.js") },
  { path: "chat", title: "Chat", group: "Use", needs: "inference:create", load: () => import("./pages/chat.js") },
  { path: "requests", title: "Requests", group: "Use", needs: "inference:view", load: () => import("./pages/requests.js") },
  { path: "tasks", title: "Tasks", group: "Use", needs: "inference:view", load: () => import("./pages/tasks.js") },
  { path: "usage", title: "Usage", group: "Use", needs: "inference:view", load: () => import("./pages/usage.js") },
  { path: "models", title: "Models", group: "Mesh", needs: "models:view", load: () => import("./pages/models.js") },
  // Pages of extensions
  { path: "memory", title: "Memory", group: "Mesh", needs: "operations:view", load: () => import("./pages/memory.js") },
  { path: "runners", title: "Runners", group: "Mesh", needs: "runners:view", load: () => import("./pages/runners.js") },
  { path: "operations", title: "Operations", group: "Mesh", needs: "operations:view", load: () => import("./pages/operations.js") },
  { path: "settings", title: "Settings", group: "Mesh", needs: "models:view", load: () => import("./pages/settings.js") },
];

/** Where pages with an earlier address are now. @type {Record<string, [string, Record<string, string>]>} */
export const MOVED = { queue: ["requests", { state: "waiting" }] };

/** The page of a path, and what is left of the path: the name of what it shows. @param {string} path */
export function pageOf(path) {
  const [first, ...rest] = path.split("/");
  const entry = PAGES.find((page) => page.path === first);
  return entry && { entry, name: rest.join("/") };
}
