// Rows of usage as CSV, as `weft mesh usage -o csv` prints them: columns by the names of the API, times and sums as numbers.

const COUNTS = {
  completed_count: "completed", failed_count: "failed", cancelled_count: "cancelled", rejected_count: "rejected", unknown_count: "unknown",
  retried_count: "retried", prompt_tokens: "promptTokens", cached_prompt_tokens: "cachedPromptTokens", completion_tokens: "completionTokens",
  unknown_tokens_count: "unknownTokens", gpu_seconds: "gpuSeconds", unknown_gpu_count: "unknownGpu", remote_count: "remote",
  remote_prompt_tokens: "remotePromptTokens", remote_completion_tokens: "remoteCompletionTokens",
  energy_millijoules: "energyMillijoules", measured_energy_count: "measuredEnergy",
  image_steps: "imageSteps", image_pixels: "imagePixels", audio_milliseconds: "audioMilliseconds",
  price_nanodollars: "priceNanodollars", priced_count: "priced", saved_nanodollars: "savedNanodollars",
};

/** @param {any[]} items @param {string[]} groups */
export function csvText(items, groups) {
  const times = groups.includes("hour") || groups.includes("day") ? ["start"] : [];
  const names = ["tenant", "key", "model", "asked", "program", "agent", "purpose"].filter((name) => groups.includes(name));
  const rows = items.map((item) => [
    ...times.map(() => `${item.start.slice(0, 16)}Z`),
    ...names.map((name) => cell(item[name] ?? "")),
    ...Object.values(COUNTS).map((name) => item[name] ?? ""),
  ]);
  return [[...times, ...names, ...Object.keys(COUNTS)], ...rows].map((row) => `${row.join(",")}\n`).join("");
}

/** A name as a cell; spreadsheets would run one that begins like a formula. @param {string} name */
function cell(name) {
  const text = /^[=+\-@]/.test(name) ? `'${name}` : name;
  return /[",\r\n]/.test(text) ? `"${text.replaceAll('"', '""')}"` : text;
}
