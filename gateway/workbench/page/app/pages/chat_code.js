// The request of an answer as it is written elsewhere: curl, Python, gRPC.
import { html, useState } from "../parts/html.js";
import { Code } from "../parts/widgets.js";
import { Dialog } from "../parts/dialog.js";
import { MESH_URL } from "../mesh.js";
import { caller } from "../session.js";
import { bodyOf, newId, revisionOf } from "./chat_conversation.js";

/** @typedef {import("./chat_conversation.js").Conversation} Conversation */

/** @param {{conversation: Conversation, at: number, column: number, onClose: () => void}} props */
export function CodeDialog({ conversation, at, column, onClose }) {
  revisionOf(conversation);
  const [kind, setKind] = useState("curl");
  const call = new Call(conversation, at, column);
  return html`<${Dialog} title="Code" isWide onClose=${onClose}>
    <div class="row" role="group" aria-label="Language">
      ${[...Object.keys(KINDS)].map((name) => html`<button key=${name} aria-pressed=${name === kind} onClick=${() => setKind(name)}>${name}</button>`)}
    </div>
    ${call.needsKey && html`<p class="faint">The key is read from <code>WEFT_API_KEY</code>.</p>`}
    ${call.names.length > 0 && html`<p class="faint">Files are read from the current folder.</p>`}
    <${Code} label=${kind} text=${KINDS[kind](call)} />
  </${Dialog}>`;
}

/** The body of a request whose files have a mark in the place of their content. */
class Call {
  /** @param {Conversation} conversation @param {number} at @param {number} column */
  constructor(conversation, at, column) {
    this.needsKey = Boolean(caller.value?.keysRequired);
    this.mark = newId("file-");
    /** @type {string[]} */
    this.names = [];
    const turns = conversation.turns.map((turn) => ({ ...turn, attachments: turn.attachments.map((file) => this.marked(file)) }));
    this.body = bodyOf({ ...conversation, turns }, column, at);
  }

  /** @param {import("./chat_conversation.js").Attachment} file */
  marked(file) {
    if (file.kind === "text") return file;
    const number = this.names.push(file.name) - 1;
    return { ...file, data: `${file.data.slice(0, file.data.indexOf(",") + 1)}${this.mark}-${number}-` };
  }

  /** JSON as the input of a command: what a shell reads in it are the files alone. @param {any} value @param {string} command */
  asInput(value, command) {
    const text = JSON.stringify(value, null, 2);
    if (!this.names.length) return `${command} <<'END'\n${text}\nEND`;
    const escaped = text.replace(/[\\$`]/g, "\\$&");
    return `${command} <<END\n${this.filled(escaped, (name) => `$(base64 < ${quoted(name)} | tr -d '\\n')`)}\nEND`;
  }

  /** A text with something in the place of its files. @param {string} text @param {(name: string) => string} how */
  filled(text, how) {
    return text.replace(new RegExp(`${this.mark}-(\\d+)-`, "g"), (_, number) => how(this.names[Number(number)]));
  }

  get key() {
    return this.needsKey ? `  -H "Authorization: Bearer $WEFT_API_KEY" \\\n` : "";
  }
}

/** A word of a shell. @param {string} text */
const quoted = (text) => `'${text.replaceAll("'", `'\\''`)}'`;

/** @param {Call} call */
function curl(call) {
  const head = `curl -sN ${MESH_URL}/v1/chat/completions \\\n${call.key}  -H 'Content-Type: application/json' --data-binary @-`;
  return call.asInput(call.body, head);
}

/** A literal of Python. @param {any} value @param {string} margin @returns {string} */
function literal(value, margin = "") {
  if (value === null || value === undefined) return "None";
  if (typeof value === "boolean") return value ? "True" : "False";
  if (typeof value !== "object") return JSON.stringify(value);
  const inner = `${margin}    `;
  const members = Array.isArray(value)
    ? value.map((member) => literal(member, inner))
    : Object.entries(value).map(([name, member]) => `${JSON.stringify(name)}: ${literal(member, inner)}`);
  const [open, close] = Array.isArray(value) ? "[]" : "{}";
  const short = `${open}${members.join(", ")}${close}`;
  return short.length < 80 && !short.includes("\n") ? short : `${open}\n${members.map((member) => `${inner}${member},\n`).join("")}${margin}${close}`;
}

/** @param {Call} call */
function python(call) {
  const { model, messages, stream, stream_options, temperature, max_tokens, ...extra } = call.body;
  const known = { model, messages, stream, stream_options: { include_usage: true }, temperature, max_tokens };
  const given = Object.entries({ ...known, ...(Object.keys(extra).length ? { extra_body: extra } : {}) })
    .filter(([, value]) => value !== undefined)
    .map(([name, value]) => `    ${name}=${literal(value, "    ")},\n`);
  const files = call.names.length ? `\ndef base64_of(path):\n    return base64.b64encode(open(path, "rb").read()).decode()\n\n` : "";
  // Only the marks of files have this form: no name of the person is in it.
  const calls = given.join("").replace(new RegExp(`"([\\w/+.:;,-]*?)${call.mark}-(\\d+)-"`, "g"), (_, prefix, number) =>
    `${prefix ? `${JSON.stringify(prefix)} + ` : ""}base64_of(${JSON.stringify(call.names[Number(number)])})`,
  );
  const key = call.needsKey ? `os.environ["WEFT_API_KEY"]` : `"none"`;
  const imports = [call.names.length && "import base64", call.needsKey && "import os"].filter(Boolean).map((line) => `${line}\n`).join("");
  return `${imports}${imports && "\n"}from openai import OpenAI

client = OpenAI(base_url="${MESH_URL}/v1", api_key=${key})
${files}
stream = client.chat.completions.create(
${calls})
for chunk in stream:
    if chunk.choices:
        print(chunk.choices[0].delta.content or "", end="", flush=True)
print()`;
}

/** @param {Call} call */
function grpcPython(call) {
  if (call.names.length) return "# weft.client sends texts. For files see grpcurl, or make the messages of weft.api.common.v1.chat_pb2.";
  const { model, messages, temperature, max_tokens, enable_thinking: thinking, allow_remote } = call.body;
  const options = Object.entries({ max_tokens, temperature, thinking, allow_remote }).filter(([, value]) => value !== undefined);
  return `from weft.client import connect

# On another machine than the mesh: WEFT_REGISTRY and WEFT_ROUTER are the addresses of its gRPC servers.
messages = ${literal(messages)}
with connect() as mesh:
    for event in mesh.chat(${[literal(model), "messages", ...options.map(([name, value]) => `${name}=${literal(value)}`)].join(", ")}):
        print(event.delta.text, end="", flush=True)
print()`;
}

/** @param {Call} call */
function grpcurl(call) {
  const { model, messages, temperature, max_tokens: maxTokens, enable_thinking: thinking, allow_remote: allowRemote } = call.body;
  const request = {
    model,
    payload: { messages: messages.map(grpcMessage), sampling: { temperature, maxTokens }, thinking },
    options: allowRemote ? { allowRemote } : undefined,
  };
  const key = call.needsKey ? `  -H "authorization: Bearer $WEFT_API_KEY" \\\n` : "";
  const head = `grpcurl -plaintext -import-path protos -proto weft/api/router/v1/inference_service.proto \\\n${key}  -d @ "$WEFT_ROUTER" weft.api.router.v1.InferenceService/Chat`;
  return `# In the folder of weft's source. WEFT_ROUTER: the address of the mesh's gRPC server, such as 127.0.0.1:7071.\n${call.asInput(request, head)}`;
}

/** @param {{role: string, content: any}} message */
function grpcMessage({ role, content }) {
  const parts = typeof content === "string" ? [{ type: "text", text: content }] : content;
  return { role: `ROLE_${role.toUpperCase()}`, content: parts.map(grpcPart) };
}

/** @param {any} part */
function grpcPart(part) {
  if (part.type === "text") return { text: part.text };
  if (part.type === "input_audio") return { audio: { data: part.input_audio.data, mediaType: part.input_audio.format === "mp3" ? "audio/mpeg" : "audio/wav" } };
  const [head, data] = part.image_url.url.split(",");
  return { image: { data, mediaType: head.slice("data:".length).split(";")[0] } };
}

/** @type {Record<string, (call: Call) => string>} */
const KINDS = { curl, Python: python, "gRPC, Python": grpcPython, grpcurl };
