// Copies the modules that the workbench's page imports out of node_modules, with their licences, and writes vendor.json:
// package, version, licence and SHA-256 of each file. Usage: node vendor.mjs <node_modules> <vendor folder>
import { createHash } from "node:crypto";
import { mkdirSync, readFileSync, rmSync, writeFileSync } from "node:fs";
import { join } from "node:path";

const [modules, vendor] = process.argv.slice(2);
const FILES = [
  ["preact", "dist/preact.mjs", "preact.mjs"],
  ["preact", "hooks/dist/hooks.mjs", "preact-hooks.mjs"],
  ["htm", "dist/htm.mjs", "htm.mjs"],
  ["@preact/signals-core", "dist/signals-core.mjs", "signals-core.mjs"],
  ["@preact/signals", "dist/signals.mjs", "signals.mjs"],
  ["markdown-it", "dist/browser/markdown-it.esm.min.mjs", "markdown-it.mjs"],
  ["uplot", "dist/uPlot.esm.js", "uplot.mjs"],
  ["uplot", "dist/uPlot.min.css", "uplot.css"],
];
rmSync(vendor, { recursive: true, force: true });
mkdirSync(vendor, { recursive: true });
const entries = [];
for (const [name, source, target] of FILES) {
  const { version, license } = JSON.parse(readFileSync(join(modules, name, "package.json"), "utf8"));
  // The browser would ask for the source map, which is not here.
  const text = readFileSync(join(modules, name, source), "utf8").replace(/\n?\/\/# sourceMappingURL=.*\n?$/, "\n");
  writeFileSync(join(vendor, target), text);
  const licence = `${name.replace("@", "").replace("/", "-")}.LICENSE`;
  writeFileSync(join(vendor, licence), readFileSync(join(modules, name, "LICENSE"), "utf8"));
  entries.push({ file: target, package: name, version, licence: license, licenceFile: licence, source,
    sha256: createHash("sha256").update(text).digest("hex") });
}
writeFileSync(join(vendor, "vendor.json"), JSON.stringify(entries, null, 2) + "\n");
