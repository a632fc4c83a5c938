// Who uses this tab: the key, which lives in the tab's sessionStorage, and what it may do.
import { computed, signal } from "@preact/signals";
import { ApiError, get, useKey } from "./api.js";
import { keptName } from "./mesh.js";

const STORED = keptName("weft.key");

/** @typedef {{keysRequired: boolean, authenticated: boolean, name?: string, tenant?: string, captured?: boolean, joinable?: boolean, scopes?: string[], version: string, traceUrl?: string}} Caller
 * `joinable`: whether runners of other machines can join here. `traceUrl`: of a trace, with {trace_id}. */

/** The caller as the gateway knows it; null before its first answer. */
export const caller = signal(/** @type {Caller | null} */ (null));
/** Why the caller is not known: the gateway is away, or the key is refused. */
export const problem = signal("");
/** Whether a key has to be entered. */
export const needsKey = computed(() => caller.value !== null && !caller.value.authenticated);

/** The question that is not answered yet. @type {Promise<void> | null} */
let asked = null;

/** Asks the gateway who the caller is, with the key of this tab; once, however many calls were refused at the same time. */
export function identify() {
  return (asked ??= ask().finally(() => (asked = null)));
}

async function ask() {
  useKey(sessionStorage.getItem(STORED), refused);
  try {
    caller.value = await get("/api/v1/caller");
    problem.value = "";
  } catch (error) {
    problem.value = error instanceof Error ? error.message : String(error);
    if (!(error instanceof ApiError && error.status === 401)) return;
    sessionStorage.removeItem(STORED);
    useKey(null, refused);
    caller.value = await get("/api/v1/caller").catch(() => null);
  }
}

/** @param {string} key */
export async function signIn(key) {
  await asked;
  sessionStorage.setItem(STORED, key.trim());
  await identify();
}

export async function signOut() {
  await asked;
  sessionStorage.removeItem(STORED);
  // Also where the gateway is away.
  if (caller.value) caller.value = { keysRequired: caller.value.keysRequired, authenticated: false, version: caller.value.version };
  await identify();
}

/** The key of this tab, for the examples that show a call; null where there is none. */
export const currentKey = () => sessionStorage.getItem(STORED);

/** A key that was valid is not any more, or callers need one by now. */
function refused() {
  if (caller.value?.authenticated) void identify();
}

/** Whether the caller may do something to some name at least, such as "models:edit".
 * @param {string} wanted */
export function can(wanted) {
  const [resource, role] = wanted.split(":");
  if (!caller.value?.authenticated) return false;
  return (caller.value.scopes ?? []).some((scope) => {
    const [on, as] = scope.split(":");
    return on.split("/")[0] === resource && as === role;
  });
}
