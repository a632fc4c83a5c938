// What a conversation without a message shows: its model, prompts to try, and how other programs use the mesh.
import { html, useState } from "../parts/html.js";
import { can } from "../session.js";
import { MESH_URL } from "../mesh.js";
import { address } from "../navigation.js";
import { command } from "../parts/commands.js";
import { Logo } from "../parts/icons.js";
import { Code, State } from "../parts/widgets.js";
import { revisionOf } from "./chat_conversation.js";
import { models } from "./chat_models.js";
import { send } from "./chat_state.js";

const PROMPTS = ["Explain how a loom works, for a ten-year-old.", "Write a haiku about rain.", "Write a Python function that counts the words of a text."];
/** What `weft launch` starts: a test compares. */
const TOOLS = { claude: "Claude Code", codex: "Codex CLI", opencode: "opencode", openwebui: "Open WebUI" };

/** @param {{conversation: import("./chat_conversation.js").Conversation}} props */
export function Welcome({ conversation }) {
  revisionOf(conversation);
  const [tool, setTool] = useState("");
  const name = conversation.models[0];
  const model = models.value?.find((each) => each.id === name);
  if (models.value && !models.value.length) {
    return html`<div class="welcome"><${Logo} /><h2>No model supports chat yet</h2>
      ${can("models:view") && html`<p><a href=${address("models", { view: "catalog" })}>Choose one from the catalog</a></p>`}</div>`;
  }
  return html`<div class="welcome"><${Logo} />
    ${model && html`<h2>${name} <${State} value=${model.status === "active" ? "ready" : model.status} /></h2>`}
    <div class="prompts">${PROMPTS.map((text) => html`<button key=${text} disabled=${!model} onClick=${() => send(text, [])}>${text}</button>`)}</div>
    <p class="faint">The answer continues if this page is closed.</p>
    ${model &&
    html`<div class="elsewhere"><${Code} label="Base URL" title="Base URL for OpenAI-compatible programs" text=${`${MESH_URL}/v1`} />
      <div class="row">${Object.entries(TOOLS).map(
        ([program, title]) => html`<button key=${program} aria-pressed=${tool === program} onClick=${() => setTool(tool === program ? "" : program)}>${title}</button>`,
      )}</div>
      ${tool && html`<${Code} label="Command" title="Run in a terminal on this machine" text=${command("launch", tool, ["--model", name])} />`}</div>`}
  </div>`;
}
