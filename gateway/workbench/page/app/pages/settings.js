// What the mesh is told to be: agents, routes, aliases and tenants as documents, API keys, and the settings of the mesh.
import { html } from "../parts/html.js";
import { address } from "../navigation.js";
import { can } from "../session.js";
import { useLive } from "../live.js";
import { KINDS, kindOf } from "./settings_kinds.js";
import { DocumentList } from "./settings_list.js";
import { DocumentEditor } from "./settings_editor.js";
import { KeyList } from "./settings_keys.js";
import { MeshSettings } from "./settings_mesh.js";

/** What is after the name of a kind for a document that is not there yet. */
const NEW = "new";

/** @param {{name: string, query: URLSearchParams}} props */
export function Page({ name, query }) {
  useLive("agent", "route", "alias", "model", "pool", ...(can("settings:view") ? ["tenant"] : []));
  const [first, ...rest] = name.split("/");
  const tab = first || KINDS[0].plural;
  const kind = kindOf(tab);
  const document = rest.join("/");
  if (kind && document) {
    // A document may be called "new": its address says that it is one that is there.
    const isNew = document === NEW && !query.get("name");
    return html`<${DocumentEditor} key=${`${tab}/${document}`} kind=${kind} name=${query.get("name") || (isNew ? "" : document)} />`;
  }
  return html`<h1>Settings</h1><${Tabs} current=${tab} />
    ${kind ? html`<${DocumentList} key=${tab} kind=${kind} />` : null}
    ${tab === "keys" && html`<${KeyList} />`}
    ${tab === "mesh" && html`<${MeshSettings} />`}`;
}

/** @param {{current: string}} props */
function Tabs({ current }) {
  const tabs = [
    ...KINDS.filter(({ rights }) => can(`${rights}:view`)).map(({ plural, title }) => ({ path: plural, title })),
    ...(can("keys:view") ? [{ path: "keys", title: "Keys" }] : []),
    ...(can("settings:view") ? [{ path: "mesh", title: "Mesh" }] : []),
  ];
  return html`<nav class="tabs" aria-label="Settings">
    ${tabs.map(({ path, title }) => html`<a key=${path} href=${address(`settings/${path}`)} aria-current=${path === current ? "page" : undefined}>${title}</a>`)}
  </nav>`;
}
