// Unpacks the browser beside `node_modules`, with the libraries and the font that it needs; run once after the install.
import { inflate } from "@sparticuz/chromium";

for (const part of ["chromium.br", "al2023.tar.br", "fonts.tar.br"]) {
  await inflate(`node_modules/@sparticuz/chromium/bin/${part}`);
}
process.exit(0);
