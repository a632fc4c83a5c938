// Unpacks the browser beside `node_modules`, with the libraries and the font that it needs; run once after the install.
import { execFileSync } from "node:child_process";
import { mkdirSync, readFileSync, writeFileSync } from "node:fs";
import { brotliDecompressSync } from "node:zlib";

// Without streams and without `process.exit`: after the package's own `inflate` one Node in ten never ended
// (nodejs/node#54918: threads of V8, at work as the process exits, and a main thread that joins them).
const unpacked = (part) => brotliDecompressSync(readFileSync(`node_modules/@sparticuz/chromium/bin/${part}.br`));

writeFileSync("chromium", unpacked("chromium"), { mode: 0o700 });
for (const folder of ["al2023", "fonts"]) {
  mkdirSync(folder);
  execFileSync("tar", ["--extract", "--no-same-owner", "--directory", folder], { input: unpacked(`${folder}.tar`) });
}
