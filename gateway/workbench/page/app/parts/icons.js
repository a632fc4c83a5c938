// The logo, and the icons: drawn on 16 x 16 with one stroke width.
import { html } from "./html.js";

/** @type {Record<string, string>} */
const PATHS = {
  "": "M2.5 8.5h4v5h-4zM9.5 2.500h4v4h-4zM2.5 2.500h4v3h-4zM9.5 9.500h4v4h-4z",
  chat: "M2.5 3.500h11v7.500h-6l-3 2.500v-2.500h-2z",
  requests: "M2.5 4h11M2.5 8h7M2.5 12h9",
  tasks: "M2.5 4.500l1.5 1.5 2-3M2.5 11l1.5 1.5 2-3M8.5 4.500h5M8.5 11h5",
  usage: "M3 13.500v-5M8 13.500v-11M13 13.500v-7.5",
  models: "M8 2l5.5 3v6l-5.5 3-5.5-3v-6zM2.5 5l5.5 3 5.5-3M8 8v6",
  memory: "M4.5 4.500h7v7h-7zM6.5 4.500v-2.500M9.5 4.500v-2.500M6.5 14v-2.500M9.5 14v-2.500M2 6.500h2.500M2 9.500h2.500M11.5 6.500h2.500M11.5 9.500h2.5",
  runners: "M2.5 3h11v4h-11zM2.5 9h11v4h-11zM5 5h.5M5 11h.5",
  operations: "M3 8a5 5 0 0 1 9-3M13 8a5 5 0 0 1-9 3M12 2v3h-3M4 14v-3h3",
  settings: "M2.5 4.500h6M11.5 4.500h2M2.5 11.500h2M7.5 11.500h6M8.5 3v3h3v-3zM4.5 10v3h3v-3z",
  search: "M7 2.500a4.5 4.5 0 1 0 0 9a4.5 4.5 0 1 0 0-9M10.5 10.500l3 3",
  calendar: "M2.5 4h11v9.500h-11zM2.5 7h11M5.5 2v3.500M10.5 2v3.500",
  copy: "M5.5 5.500v-3h8v8h-3M2.5 5.500h8v8h-8z",
};

/** An icon of this file, or one that is given. @param {{name: string, path?: string}} props */
export const Icon = ({ name, path = PATHS[name] }) => html`<svg class="icon" viewBox="0 0 16 16" aria-hidden="true"><path d=${path} /></svg>`;

/** The mark of weft: threads across a warp. */
export const Logo = () => html`<svg class="logo" viewBox="0 0 32 32" aria-hidden="true"><rect width="32" height="32" rx="7" />
  <path d="M7 9v14M13 9v14M19 9v14M25 9v14" opacity=".45" /><path d="M4.5 13c2.5 0 2.5-2 5.5-2s3 4 6 4 3-4 6-4 3 2 5.5 2M4.5 20c2.5 0 2.5 2 5.5 2s3-4 6-4 3 4 6 4 3-2 5.5-2" /></svg>`;
