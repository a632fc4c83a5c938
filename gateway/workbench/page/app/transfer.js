// Files to and from the mesh: uploads with their progress, and downloads that carry the key.
import { ApiError, send } from "./api.js";
import { ROOT } from "./mesh.js";
import { currentKey, identify } from "./session.js";

/** Uploads a form. Raises ApiError as `send` does.
 * `onProgress`: the share that is sent, from 0 to 1.
 * @param {string} path @param {FormData} form
 * @param {{onProgress?: (share: number) => void, signal?: AbortSignal}} [options] @returns {Promise<any>} */
export function upload(path, form, { onProgress, signal } = {}) {
  return new Promise((resolve, reject) => {
    // Unlike fetch it says how much is sent.
    const request = new XMLHttpRequest();
    request.open("POST", ROOT + path);
    const key = currentKey();
    if (key !== null) request.setRequestHeader("Authorization", `Bearer ${key}`);
    request.upload.addEventListener("progress", (event) => event.lengthComputable && onProgress?.(event.loaded / event.total));
    request.addEventListener("load", () => {
      if (request.status >= 200 && request.status < 300) resolve(JSON.parse(request.responseText));
      else reject(refusal(request));
    });
    request.addEventListener("error", () => reject(new ApiError(0, { message: "The upload was interrupted: the gateway is unreachable or refused it.", code: "unreachable" })));
    request.addEventListener("abort", () => reject(new ApiError(0, { message: "The upload was stopped.", code: "cancelled" })));
    signal?.addEventListener("abort", () => request.abort());
    request.send(form);
  });
}

/** @param {XMLHttpRequest} request */
function refusal(request) {
  if (request.status === 401) void identify();
  const requestId = request.getResponseHeader("x-request-id") ?? "";
  try {
    return new ApiError(request.status, JSON.parse(request.responseText).error ?? {}, requestId);
  } catch {
    return new ApiError(request.status, {}, requestId);
  }
}

/** Saves what a path answers as a file. Raises ApiError. @param {string} path @param {string} name */
export async function download(path, name) {
  const response = await send("GET", path);
  save(await response.blob(), name);
}

/** Saves a text as a file. @param {string} text @param {string} name @param {string} type */
export function saveText(text, name, type) {
  save(new Blob([text], { type }), name);
}

/** @param {Blob} content @param {string} name */
function save(content, name) {
  const url = URL.createObjectURL(content);
  const link = document.createElement("a");
  link.href = url;
  link.download = name;
  link.click();
  // The browser has begun to read it by then.
  setTimeout(() => URL.revokeObjectURL(url), 60_000);
}
