// Text files of a message: written into its text, each with its name, and found there again.
import { send } from "../api.js";

/** @typedef {import("./chat_conversation.js").Attachment} Attachment */

/** A larger file is refused. */
export const MAX_TEXT_BYTES = 2 * 1024 * 1024;
/** A larger PDF is refused by the server. */
const MAX_PDF_BYTES = 20 * 1024 * 1024;
const PDF = "application/pdf";
/** A file in a message, as `withFiles` writes it. */
const WRITTEN = /^File ("(?:[^"\\\n]|\\.)*"):\n(`{3,})\n([\s\S]*?)\n\2\n\n/;

/** The text of a file. Raises Error where it is none. @param {File} file */
export async function textOfFile(file) {
  const isPdf = file.type === PDF || /\.pdf$/i.test(file.name);
  const most = isPdf ? MAX_PDF_BYTES : MAX_TEXT_BYTES;
  if (file.size > most) throw new Error(`${file.name} is larger than ${most / 1024 / 1024} MiB.`);
  if (isPdf) return textOfPdf(file);
  try {
    const text = new TextDecoder("utf-8", { fatal: true }).decode(await file.arrayBuffer());
    if (!text.includes("\0")) return text;
  } catch {
    // Said below.
  }
  throw new Error(`${file.name} is not a text file, a PDF, an image or a recording.`);
}

/** The text of a PDF, which the server extracts and does not store. @param {File} file @returns {Promise<string>} */
async function textOfPdf(file) {
  try {
    const answer = await send("POST", "/api/v1/pdf-text", { form: file, headers: { "Content-Type": PDF } });
    return (await answer.json()).text;
  } catch (error) {
    throw new Error(`${file.name}: ${error instanceof Error ? error.message : error}`);
  }
}

/** A message with its text files before it. @param {string} text @param {Attachment[]} attachments */
export function withFiles(text, attachments) {
  const files = attachments.filter((file) => file.kind === "text").map(({ name, data }) => {
    const longest = Math.max(2, ...[...data.matchAll(/`+/g)].map(([ticks]) => ticks.length));
    const fence = "`".repeat(longest + 1);
    return `File ${JSON.stringify(name)}:\n${fence}\n${data}\n${fence}\n\n`;
  });
  return files.join("") + text;
}

/** What `withFiles` has written. @param {string} written @returns {{text: string, files: Attachment[]}} */
export function withoutFiles(written) {
  /** @type {Attachment[]} */
  const files = [];
  let text = written;
  for (let found = WRITTEN.exec(text); found; found = WRITTEN.exec(text)) {
    const [all, name, , data] = found;
    files.push({ kind: "text", name: JSON.parse(name), type: "text/plain", bytes: new Blob([data]).size, data });
    text = text.slice(all.length);
  }
  return { text, files };
}
