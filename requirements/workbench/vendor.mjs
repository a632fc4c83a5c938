// Copies the modules that the workbench's page imports out of node_modules, with their licences, and writes vendor.json:
// package, version, licence and SHA-256 of each file. Usage: node vendor.mjs <node_modules> <vendor folder>
import { createHash } from "node:crypto";
import { mkdirSync, readdirSync, readFileSync, rmSync, writeFileSync } from "node:fs";
import { join } from "node:path";

const [modules, vendor] = process.argv.slice(2);
const FILES = [
  ["preact", "dist/preact.mjs", "preact.mjs"],
  ["preact", "hooks/dist/hooks.mjs", "preact-hooks.mjs"],
  ["htm", "dist/htm.mjs", "htm.mjs"],
  ["@preact/signals-core", "dist/signals-core.mjs", "signals-core.mjs"],
  ["@preact/signals", "dist/signals.mjs", "signals.mjs"],
  ["markdown-it", "dist/browser/markdown-it.esm.min.mjs", "markdown-it.mjs"],
  // The next two are loaded when an answer first needs them. KaTeX's module is not minified; this file names a global.
  ["katex", "dist/katex.min.js", "katex.mjs"],
  ["@highlightjs/cdn-assets", "es/highlight.min.js", "highlight.mjs"],
  // Loaded by the frame of a diagram, as a script: the frame has no origin that could load a module.
  ["@mermaid-js/tiny", "dist/mermaid.tiny.js", "mermaid.js"],
];
/** Packages whose code is within a file of another one. */
const BUNDLED = {
  "markdown-it": ["entities", "linkify-it", "mdurl", "punycode.js", "uc.micro"],
  "@mermaid-js/tiny": [
    "@braintree/sanitize-url", "@iconify/utils", "@mermaid-js/parser", "@upsetjs/venn.js", "chevrotain", "d3", "d3-sankey",
    "dagre-d3-es", "dayjs", "dompurify", "es-toolkit", "khroma", "lodash-es", "marked", "mermaid", "roughjs", "stylis",
    "ts-dedent",
  ],
};

/** Copies the licence of a package, and says what the package is. */
function described(name) {
  const { version, license } = JSON.parse(readFileSync(join(modules, name, "package.json"), "utf8"));
  const licenceFile = `${name.replace("@", "").replace("/", "-")}.LICENSE`;
  const source = readdirSync(join(modules, name)).find((file) => /^LICEN[CS]E/i.test(file));
  writeFileSync(join(vendor, licenceFile), readFileSync(join(modules, name, source), "utf8"));
  return { package: name, version, licence: license, licenceFile };
}

rmSync(vendor, { recursive: true, force: true });
mkdirSync(vendor, { recursive: true });
const entries = [];
for (const [name, source, target] of FILES) {
  // The browser would ask for the source map, which is not here.
  const text = readFileSync(join(modules, name, source), "utf8").replace(/\n?\/\/# sourceMappingURL=.*\n?$/, "\n");
  writeFileSync(join(vendor, target), text);
  const sha256 = createHash("sha256").update(text).digest("hex");
  const bundles = (BUNDLED[name] ?? []).map(described);
  entries.push({ file: target, ...described(name), source, sha256, ...(bundles.length ? { bundles } : {}) });
}
writeFileSync(join(vendor, "vendor.json"), JSON.stringify(entries, null, 2) + "\n");
