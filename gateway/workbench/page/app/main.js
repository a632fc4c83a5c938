// The entry of the page.
import { render } from "preact";
import { html } from "./parts/html.js";
import { Shell } from "./shell.js";
import { identify } from "./session.js";
import { applyTheme } from "./navigation.js";

applyTheme();
void identify();
const root = /** @type {HTMLElement} */ (document.getElementById("app"));
root.replaceChildren();
render(html`<${Shell} />`, root);
