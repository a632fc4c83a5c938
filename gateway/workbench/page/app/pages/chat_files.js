// Files of a message: read whole as they are, shown, and pictures made smaller only where somebody asks for it.
import { html, useState } from "../parts/html.js";
import { bytes } from "../parts/format.js";
import { Code } from "../parts/widgets.js";
import { textOfFile } from "./chat_text_files.js";
import { attempt } from "../parts/notices.js";

/** @typedef {import("./chat_conversation.js").Attachment} Attachment */

/** The longer side of a picture that is made smaller, in pixels. */
const SMALL_PIXELS = 1024;
const JPEG_QUALITY = 0.9;

/** Reads files. Raises Error for one that is no text, picture or recording, or that a chosen model does not take.
 * @param {File[]} files @param {(skill: "image" | "audio") => string} refusal of a model, "" where all take it @returns {Promise<Attachment[]>} */
export async function read(files, refusal) {
  const found = [];
  for (const file of files) {
    const kind = /^(image|audio)\//.exec(file.type)?.[1];
    if (kind !== "image" && kind !== "audio") {
      found.push({ kind: "text", name: file.name || "text", type: file.type, bytes: file.size, data: await textOfFile(file) });
      continue;
    }
    const why = refusal(kind);
    if (why) throw new Error(why);
    found.push({ kind, name: file.name || kind, type: file.type, bytes: file.size, data: await dataOf(file) });
  }
  return /** @type {Attachment[]} */ (found);
}

/** @param {Blob} file @returns {Promise<string>} a data: URL */
const dataOf = (file) =>
  new Promise((resolve, reject) => {
    const reader = new FileReader();
    reader.onload = () => resolve(String(reader.result));
    reader.onerror = () => reject(reader.error);
    reader.readAsDataURL(file);
  });

/** A smaller copy of a picture. @param {Attachment} file @param {HTMLImageElement} image @returns {Promise<Attachment>} */
async function smaller(file, image) {
  const scale = SMALL_PIXELS / Math.max(image.naturalWidth, image.naturalHeight);
  const canvas = new OffscreenCanvas(Math.round(image.naturalWidth * scale), Math.round(image.naturalHeight * scale));
  const context = /** @type {OffscreenCanvasRenderingContext2D} */ (canvas.getContext("2d"));
  context.drawImage(image, 0, 0, canvas.width, canvas.height);
  const type = file.type === "image/jpeg" ? "image/jpeg" : "image/png";
  const blob = await canvas.convertToBlob({ type, quality: JPEG_QUALITY });
  return { ...file, type, bytes: blob.size, data: await dataOf(blob) };
}

/** Files of the message that is being written. @param {{files: Attachment[], onChange: (files: Attachment[]) => void}} props */
export function FileChips({ files, onChange }) {
  if (!files.length) return null;
  return html`<ul class="files" aria-label="Files">
    ${files.map((file, at) => html`<${FileChip} key=${`${at} ${file.name}`} file=${file}
      onChange=${(/** @type {Attachment | null} */ changed) => onChange(changed ? files.with(at, changed) : files.filter((_, other) => other !== at))} />`)}
  </ul>`;
}

/** @param {{file: Attachment, onChange: (file: Attachment | null) => void}} props */
function FileChip({ file, onChange }) {
  // A separate object per load: the element stays the same when its picture is made smaller.
  const [loaded, setLoaded] = useState(/** @type {{image: HTMLImageElement, width: number, height: number} | null} */ (null));
  const sides = loaded ? `${loaded.width} x ${loaded.height}, ` : "";
  const isLarge = loaded !== null && Math.max(loaded.width, loaded.height) > SMALL_PIXELS;
  const onLoad = (/** @type {any} */ { target: image }) => setLoaded({ image, width: image.naturalWidth, height: image.naturalHeight });
  return html`<li>
    ${file.kind === "image" && html`<img src=${file.data} alt="" onLoad=${onLoad} />`}
    <span class="name">${file.name}</span> <span class="faint">${sides}${bytes(file.bytes)}</span>
    ${isLarge && html`<button class="quiet" onClick=${() => void attempt(async () => onChange(await smaller(file, loaded.image)))}>Make smaller</button>`}
    <button class="quiet" aria-label=${`Remove ${file.name}`} onClick=${() => onChange(null)}>×</button>
  </li>`;
}

/** Files of a message that was sent. @param {{files: Attachment[]}} props */
export function SentFiles({ files }) {
  if (!files.length) return null;
  return html`<div class="sent-files">
    ${files.map((file, at) =>
      file.kind === "image"
        ? html`<img key=${at} src=${file.data} alt=${file.name} title=${file.name} />`
        : file.kind === "text"
          ? html`<details key=${at} class="text-file"><summary><bdi>${file.name}</bdi> <span class="faint">${bytes(file.bytes)}</span></summary>
              <${Code} label=${file.name} text=${file.data} canWrap /></details>`
          : html`<audio key=${at} src=${file.data} controls aria-label=${file.name}></audio>`,
    )}
  </div>`;
}
