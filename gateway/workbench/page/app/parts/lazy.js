// Components whose module is loaded when they are first shown.
import { html, useEffect, useState } from "./html.js";
import { attempt } from "./notices.js";

/** @param {() => Promise<any>} load gives the component */
export function lazy(load) {
  /** @param {any} props */
  return function Lazy(props) {
    const [found, setFound] = useState(/** @type {{Component?: any}} */ ({}));
    useEffect(() => void attempt(async () => setFound({ Component: await load() })), []);
    return found.Component ? html`<${found.Component} ...${props} />` : html`<div class="skeleton" role="status" aria-label="Loading"></div>`;
  };
}
