// Whether the gateway serves another version of this page by now: then modules that are not loaded yet are missing.
import { signal } from "@preact/signals";
import { ROOT } from "./mesh.js";

/** The digest of all files of the page, which is in the path of each. */
export const VERSION = new URL("..", import.meta.url).pathname.split("/").at(-2) ?? "";

export const isOutdated = signal(false);

/** Asks the gateway for the version that it serves; false: it does not answer. */
export async function checkVersion() {
  try {
    const response = await fetch(`${ROOT}/ui/`, { method: "HEAD", cache: "no-store" });
    const found = response.headers.get("etag") ?? "";
    isOutdated.value = response.ok && found !== "" && !found.includes(VERSION);
    return response.ok;
  } catch {
    return false;
  }
}
