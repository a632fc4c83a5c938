// Commands of the command line that do what an action of the page does.

/** A word as a shell takes it. @param {string | number} value */
export function quoted(value) {
  const text = String(value);
  return /^[\w@%+=:,./~-]+$/.test(text) && !text.startsWith("~") ? text : `'${text.replaceAll("'", "'\\''")}'`;
}

/** A command of `weft`: words, and options as [option, value] pairs. A value of `true` is the option alone; options without a
 * value are left out.
 * @param {(string | [string, string | number | boolean | undefined | null])[]} parts */
export function command(...parts) {
  /** @type {string[]} */
  const words = ["weft"];
  for (const part of parts) {
    if (typeof part === "string") words.push(quoted(part));
    else if (part[1] === true) words.push(part[0]);
    else if (part[1] !== undefined && part[1] !== null && part[1] !== "" && part[1] !== false) words.push(part[0], quoted(part[1]));
  }
  return words.join(" ");
}
