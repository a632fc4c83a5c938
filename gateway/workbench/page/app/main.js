// The entry of the page.
import { render } from "preact";
import { html } from "./parts/html.js";
import { Shell } from "./shell.js";
import { identify } from "./session.js";
import { applyTheme } from "./navigation.js";

// They are relative to the address, which changes with the page that is shown, and the browser may ask for them later.
for (const link of /** @type {NodeListOf<HTMLLinkElement>} */ (document.querySelectorAll("link[rel=icon], link[rel=manifest]"))) link.href = link.href;
applyTheme();
void identify();
const root = /** @type {HTMLElement} */ (document.getElementById("app"));
root.replaceChildren();
render(html`<${Shell} />`, root);
