// The frame of the page: navigation, the key, the connection, and the page of the address.
import { html, useEffect, useErrorBoundary, useState, useRef } from "./parts/html.js";
import { awayBecause, comebacks, connection, restart, useLive } from "./live.js";
import { address, applyTheme, followLink, go, place, theme } from "./navigation.js";
import { Overlays, show } from "./overlays.js";
import { CaptureNote } from "./parts/capture_note.js";
import { Icon, Logo } from "./parts/icons.js";
import { Notices } from "./parts/notices.js";
import { MOVED, PAGES, pageOf } from "./page_table.js";
import { checkVersion, isOutdated } from "./version.js";
import { caller, can, identify, needsKey, problem, signIn, signOut } from "./session.js";

const RETRY_MILLISECONDS = 1000;
/** When this tab was loaded again for a module, and how long that is not repeated. */
const RELOADED = "weft.reloaded";
const RELOAD_MILLISECONDS = 30_000;

export function Shell() {
  const moved = MOVED[place.value.path];
  const found = pageOf(moved?.[0] ?? place.value.path);
  useEffect(() => void (moved && go(...moved, { replace: true })), [moved]);
  const title = found ? found.entry.title : "Not found";
  useEffect(() => {
    document.title = `${title} · weft`;
  }, [title]);
  useEffect(() => void (comebacks.value && checkVersion()), [comebacks.value]);
  return html`<div class="shell" onClick=${followLink}>
    <a class="skip" href="#main">Skip to content</a>
    <${Header} current=${found?.entry.path} />
    <main id="main" tabindex="-1">${isOutdated.value && html`<${Outdated} />`}${caller.value?.authenticated && html`<${CaptureNote} />`}<${Content} found=${found} /></main>
    <${Notices} /><${Overlays} />
  </div>`;
}

/** @param {{found: ReturnType<typeof pageOf>}} props */
function Content({ found }) {
  if (caller.value === null) return html`<${Waiting} />`;
  if (needsKey.value) return html`<${SignIn} />`;
  if (!found) return html`<section class="panel"><h1>Not found</h1><p><a href=${address("")}>Overview</a></p></section>`;
  if (!can(found.entry.needs)) {
    return html`<section class="panel"><h1>${found.entry.title}</h1>
      <p>Your key lacks <code>${found.entry.needs}</code>, which this page needs.</p></section>`;
  }
  return html`<${Loaded} key=${found.entry.path} entry=${found.entry} name=${found.name} />`;
}

/** Shown where the gateway was updated while this tab was open. */
function Outdated() {
  return html`<section class="panel row" role="status"><span class="fill">The gateway has a newer version of this page.</span>
    <button onClick=${() => location.reload()}>Reload</button></section>`;
}

/** Loads the document again, in which a module that failed stays failed; not if that was done less than half a minute ago.
 * Returns after how many milliseconds it may be done. */
function reloadOnce() {
  const since = Date.now() - Number(sessionStorage.getItem(RELOADED) ?? 0);
  if (since >= 0 && since < RELOAD_MILLISECONDS) return RELOAD_MILLISECONDS - since;
  sessionStorage.setItem(RELOADED, String(Date.now()));
  location.reload();
  return RELOAD_MILLISECONDS;
}

/** A page whose module comes when it is first shown. @param {{entry: import("./page_table.js").PageEntry, name: string}} props */
function Loaded({ entry, name }) {
  const [page, setPage] = useState(/** @type {{Page?: any, problem?: string}} */ ({}));
  const [failure] = useErrorBoundary((error) => console.warn(error));
  useEffect(() => {
    let timer = 0;
    let isGone = false;
    const reloadAfter = (/** @type {number} */ milliseconds) => void (isGone || (timer = setTimeout(reload, milliseconds)));
    const reload = async () => {
      const answers = await checkVersion();
      if (!isGone) reloadAfter(answers ? reloadOnce() : RETRY_MILLISECONDS);
    };
    entry.load().then(
      (module) => setPage({ Page: module.Page }),
      () => {
        setPage({ problem: "This page could not be loaded. Trying again when the gateway answers…" });
        reloadAfter(RETRY_MILLISECONDS);
      },
    );
    return () => {
      isGone = true;
      clearTimeout(timer);
    };
  }, [entry]);
  const problem = failure ? `This page failed: ${failure.message ?? failure}` : page.problem;
  if (problem) {
    return html`<section class="panel" role="alert"><h1>${entry.title}</h1><p>${problem}</p><button onClick=${() => location.reload()}>Reload</button></section>`;
  }
  return page.Page ? html`<${page.Page} name=${name} query=${place.value.query} />` : html`<div class="skeleton" role="status" aria-label="Loading"></div>`;
}

/** Shown until the gateway answers. */
function Waiting() {
  useEffect(() => {
    const timer = setInterval(() => void identify(), RETRY_MILLISECONDS);
    return () => clearInterval(timer);
  }, []);
  return problem.value ? html`<section class="panel" role="alert"><h1>weft</h1><p>${problem.value} Trying again…</p></section>` : null;
}

function SignIn() {
  const field = useRef(/** @type {HTMLInputElement | null} */ (null));
  /** @param {Event} event */
  const submit = async (event) => {
    event.preventDefault();
    await signIn(field.current?.value ?? "");
    restart();
  };
  return html`<section class="panel narrow">
    <h1>Sign in</h1>
    <form onSubmit=${submit}>
      <label>API key <input ref=${field} type="password" name="key" autocomplete="off" spellcheck=${false} required autofocus /></label>
      ${problem.value && html`<p class="problem" role="alert">${problem.value}</p>`}
      <button type="submit" class="main">Sign in</button>
    </form>
    <p class="faint">The key stays in this tab. A new one: <code>weft keys create</code>.</p>
  </section>`;
}

/** @param {{current: string | undefined}} props */
function Header({ current }) {
  const [isOpen, setOpen] = useState(false);
  useEffect(() => setOpen(false), [place.value.path]);
  const shown = caller.value?.authenticated ? PAGES.filter((page) => can(page.needs)) : [];
  const groups = [...new Set(shown.map((page) => page.group))];
  return html`<header class=${isOpen ? "open" : ""}>
    <div class="brand"><a href=${address("")}><${Logo} />weft</a><${Connection} />
      <button class="menu quiet" aria-expanded=${isOpen} aria-controls="pages" onClick=${() => setOpen(!isOpen)}>Menu</button></div>
    <nav id="pages" aria-label="Pages">
      ${groups.map(
        (group) => html`<div class="group" key=${group}><span class="faint">${group}</span>
          ${shown
            .filter((page) => page.group === group)
            .map(
              (page) => html`<a key=${page.path} href=${address(page.path)} aria-current=${page.path === current ? "page" : undefined}><${Icon} name=${page.path} path=${page.icon} />${page.title}</a>`,
            )}</div>`,
      )}
    </nav>
    <div class="who">
      ${caller.value?.authenticated && html`<button title="Ctrl+K" onClick=${() => show("search")}><${Icon} name="search" />Search</button>`}
      <label>Theme <select value=${theme.value} onChange=${(/** @type {any} */ event) => applyTheme(event.target.value)}>
        <option value="">System</option><option value="light">Light</option><option value="dark">Dark</option></select></label>
      ${caller.value?.keysRequired &&
      caller.value.authenticated &&
      html`<span class="faint">${caller.value.tenant}</span>
        <button class="quiet" onClick=${() => signOut().then(restart)}>Sign out</button>`}
    </div>
  </header>`;
}

const CONNECTIONS = { live: "live", connecting: "connecting", away: "away" };

/** Whether the mesh answers, on every page: also on one that watches nothing. */
function Connection() {
  useLive(...(can("models:view") ? ["model"] : []));
  const state = /** @type {keyof typeof CONNECTIONS} */ (connection.value);
  if (!caller.value?.authenticated || !state) return null;
  return html`<span class="connection ${state}" role="status" title=${state === "away" ? awayBecause.value : ""}>${CONNECTIONS[state]}</span>`;
}
