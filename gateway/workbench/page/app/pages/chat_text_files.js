// Text files of a message: written into its text, each with its name, and found there again.
/** @typedef {import("./chat_conversation.js").Attachment} Attachment */

/** A larger file is refused. */
export const MAX_TEXT_BYTES = 2 * 1024 * 1024;
/** A file in a message, as `withFiles` writes it. */
const WRITTEN = /^File ("(?:[^"\\\n]|\\.)*"):\n(`{3,})\n([\s\S]*?)\n\2\n\n/;

/** The text of a file. Raises Error where it is none. @param {File} file */
export async function textOfFile(file) {
  if (file.size > MAX_TEXT_BYTES) throw new Error(`${file.name} is larger than ${MAX_TEXT_BYTES / 1024 / 1024} MiB.`);
  try {
    const text = new TextDecoder("utf-8", { fatal: true }).decode(await file.arrayBuffer());
    if (!text.includes("\0")) return text;
  } catch {
    // Said below.
  }
  throw new Error(`${file.name} is not a text file, an image or a recording.`);
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
