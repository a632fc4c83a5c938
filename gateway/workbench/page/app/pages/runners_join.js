// The dialog that joins a machine: one command with its token, watched until the machine is there.
import { html, useState } from "../parts/html.js";
import { post } from "../api.js";
import { address } from "../navigation.js";
import { caller } from "../session.js";
import { command } from "../parts/commands.js";
import { Dialog } from "../parts/dialog.js";
import { clock } from "../parts/format.js";
import { Code, ErrorNote, State } from "../parts/widgets.js";
import { modelsText, stateOf } from "./runners.js";

/** How long a token may be good: its words, the seconds, and what the command line takes. @type {[string, number, string][]} */
const LIFETIMES = [
  ["one hour", 3600, "1h"],
  ["one day", 86_400, "1d"],
  ["7 days", 7 * 86_400, "7d"],
  ["30 days", 30 * 86_400, "30d"],
];

/** @param {{runners: import("../live.js").Collection, onClose: () => void}} props */
export function JoinDialog({ runners, onClose }) {
  const [description, setDescription] = useState("");
  const [names, setNames] = useState("");
  const [pool, setPool] = useState("");
  const [lifetime, setLifetime] = useState(86_400);
  const [made, setMade] = useState(/** @type {any} */ (null));
  const [error, setError] = useState(/** @type {unknown} */ (null));
  /** @param {Event} event */
  const submit = async (event) => {
    event.preventDefault();
    try {
      const before = new Map([...runners.items].map(([name, runner]) => [name, runner.status?.incarnation]));
      const token = await post("/v1/admin/join-tokens", { description, namePattern: names, pool, lifetimeSeconds: lifetime });
      setMade({ ...token, before });
    } catch (failure) {
      setError(failure);
    }
  };
  if (made) return html`<${Dialog} title="Join a machine" onClose=${onClose} isWide><${Waiting} made=${made} runners=${runners} onClose=${onClose} /></${Dialog}>`;
  if (caller.value?.joinable === false) return html`<${Dialog} title="Join a machine" onClose=${onClose}><${Unjoinable} onClose=${onClose} /></${Dialog}>`;
  const expires = LIFETIMES.find(([, seconds]) => seconds === lifetime)?.[2];
  return html`<${Dialog} title="Join a machine" onClose=${onClose}>
    <form onSubmit=${submit}>
      <p>The other machine opens one connection to this mesh and serves its models here. It needs no open port.</p>
      <div class="fields">
        <label>For <input value=${description} maxlength="128" placeholder="Ann's laptop" onInput=${(/** @type {any} */ event) => setDescription(event.target.value)} /></label>
        <label>Names <input value=${names} maxlength="128" placeholder="any new name, or ann-*" onInput=${(/** @type {any} */ event) => setNames(event.target.value)} /></label>
        <label>Pool of others <input value=${pool} maxlength="128" placeholder="none" onInput=${(/** @type {any} */ event) => setPool(event.target.value)} /></label>
        <label>Expires in <select value=${lifetime} onChange=${(/** @type {any} */ event) => setLifetime(Number(event.target.value))}>
          ${LIFETIMES.map(([shown, seconds]) => html`<option key=${seconds} value=${seconds}>${shown}</option>`)}</select></label>
      </div>
      <${Code} label="Command" text=${command("runner", "token", "create", ["--description", description], ["--name", names], ["--pool", pool], ["--expires", expires])} />
      <${ErrorNote} error=${error} />
      <div class="buttons"><button type="button" onClick=${onClose}>Cancel</button><button type="submit" class="main">Create join command</button></div>
    </form>
  </${Dialog}>`;
}

/** What to do first where no machine can join. @param {{onClose: () => void}} props */
function Unjoinable({ onClose }) {
  return html`<p>No machine can join yet, because this mesh listens on its own machine alone. Open it to the network, which also requires keys; or set <code>relay.listen</code> in weft.yaml:</p>
    <${Code} label="Command" text=${command("mesh", "restart", "--", ["--host", "0.0.0.0"])} />
    <p>Where the router runs on another machine, create the token there:</p>
    <${Code} label="Command on the router's machine" text=${command("runner", "token", "create")} />
    <div class="buttons"><button class="main" onClick=${onClose}>Close</button></div>`;
}

/** The command, and who has come since it was made. @param {{made: any, runners: import("../live.js").Collection, onClose: () => void}} props */
function Waiting({ made, runners, onClose }) {
  const come = [...runners.items.values()].filter(
    ({ name, status }) => status?.link === "dial-out" && status.state === "active" && made.before.get(name) !== status.incarnation,
  );
  return html`<p>Type this on the other machine, where weft is installed${made.thisMachineOnly ? "; it works only on this machine, because the relay listens on loopback" : ""}:</p>
    <${Code} label="Command for the other machine" text=${made.command} />
    <p class="faint">It holds the token, which is shown only now, works for one machine${made.expireTime ? ` and ends ${clock(made.expireTime)}` : ""}. Revoke it in the list of tokens.</p>
    <div role="status" class="panel">
      ${come.length
        ? come.map((runner) => html`<p key=${runner.name}><a href=${address(`runners/${runner.name}`)}>${runner.name}</a> has joined from ${runner.status.host}: <${State} value=${stateOf(runner)} /> models: ${modelsText(runner)}.</p>`)
        : html`<p><${State} value="waiting" /> Waiting for a machine to join…</p>`}</div>
    <div class="buttons"><button class="main" onClick=${onClose}>Done</button></div>`;
}
