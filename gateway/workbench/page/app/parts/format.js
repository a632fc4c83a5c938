// Numbers and times in words: bytes, counts, durations.

const UNITS = ["B", "KiB", "MiB", "GiB", "TiB"];

/** Bytes, such as "1.5 GiB"; "" where they are unknown. @param {number | string | undefined | null} value */
export function bytes(value) {
  let size = toNumber(value);
  if (size === null) return "";
  let unit = 0;
  while (size >= 1024 && unit < UNITS.length - 1) {
    size /= 1024;
    unit += 1;
  }
  return `${size >= 100 || unit === 0 ? Math.round(size) : size.toFixed(1)} ${UNITS[unit]}`;
}

/** A count, such as "12.3k". @param {number | string | undefined | null} value */
export function count(value) {
  const number = toNumber(value);
  if (number === null) return "";
  if (number < 10_000) return String(Math.round(number));
  return number < 1_000_000 ? `${(number / 1000).toFixed(1)}k` : `${(number / 1_000_000).toFixed(1)}M`;
}

/** A rate or another figure with three digits. @param {number | undefined | null} value */
export function figure(value) {
  if (value === undefined || value === null || Number.isNaN(value)) return "";
  return value >= 100 ? String(Math.round(value)) : value.toPrecision(value >= 1 ? 3 : 2);
}

/** An amount of money in billionths of a dollar: "$12.30", "$0.0042". @param {number | undefined | null} value */
export function dollars(value) {
  if (value === undefined || value === null) return "";
  const amount = value / 1e9;
  return `$${amount.toFixed(amount > 0 && amount < 1 ? Math.max(2, 1 - Math.floor(Math.log10(amount))) : 2)}`;
}

/** Seconds, such as "420 ms", "1.2 s", "3 min 5 s", "2 h 4 min". @param {number | string | undefined | null} value */
export function seconds(value) {
  const number = toNumber(value);
  if (number === null) return "";
  if (number < 1) return `${Math.round(number * 1000)} ms`;
  if (number < 60) return `${number.toFixed(number < 10 ? 1 : 0)} s`;
  const whole = Math.round(number);
  if (whole < 3600) return `${Math.floor(whole / 60)} min ${whole % 60} s`;
  if (whole < 86_400) return `${Math.floor(whole / 3600)} h ${Math.floor((whole % 3600) / 60)} min`;
  return `${Math.floor(whole / 86_400)} d ${Math.floor((whole % 86_400) / 3600)} h`;
}

/** A time of day, with the date where it is not today. @param {string | number | undefined | null} value */
export function clock(value) {
  if (!value) return "";
  const time = new Date(value);
  const isToday = time.toDateString() === new Date().toDateString();
  return isToday ? time.toLocaleTimeString() : time.toLocaleString();
}

/** How long ago. @param {string | number | undefined | null} value @param {number} now milliseconds */
export function ago(value, now = Date.now()) {
  return value ? `${seconds(Math.max(0, now - new Date(value).getTime()) / 1000)} ago` : "";
}

/** Words of an enum, such as "hibernating" of "HIBERNATING" or "load_failed". @param {string | undefined} value */
export const words = (value) => (value ?? "").toLowerCase().replaceAll("_", " ");

/** Who did something, by the name of a caller; empty: no one, or not known. @param {string | undefined} name */
export const actor = (name) => (name === "local" ? "an operator on this machine" : (name ?? ""));

/** JSON documents of the mesh have 64-bit numbers as text. @param {number | string | undefined | null} value */
export function toNumber(value) {
  if (value === undefined || value === null || value === "") return null;
  const number = Number(value);
  return Number.isFinite(number) ? number : null;
}
