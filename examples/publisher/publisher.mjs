// A publisher of weft in plain Node: it serves a model to a mesh over HTTP, without any package (docs/laptops.md).
//
//   WEFT_JOIN_TOKEN=wjt_... node publisher.mjs https://mesh.example:7480 --name ann-laptop --model ann-qwen \
//       --url http://127.0.0.1:11434 --upstream-model qwen2.5:7b
//
// Without --url it answers by itself: it counts to the number of words it was asked, one word per chunk.
// A certificate of the mesh's own: NODE_EXTRA_CA_CERTS=cert.pem.

import { parseArgs } from "node:util";

const { values, positionals } = parseArgs({
  allowPositionals: true,
  options: {
    name: { type: "string", default: "node-publisher" },
    model: { type: "string", default: "node-model" },
    pool: { type: "string", default: "" },
    slots: { type: "string", default: "4" },
    url: { type: "string" },
    "upstream-model": { type: "string", default: "" },
    "pause-ms": { type: "string", default: "0" },
  },
});
const mesh = `${positionals[0]}/publisher/v1`;
const running = new Map(); // the AbortController of each task
let session = "";

const sleep = (ms) => new Promise((resolve) => setTimeout(resolve, ms));

async function call(path, body, more = {}) {
  const headers = { "content-type": "application/json", "weft-publisher-session": session, ...more.headers };
  const response = await fetch(`${mesh}/${path}`, { method: "POST", body: JSON.stringify(body), ...more, headers });
  const answer = response.status === 204 ? {} : await response.json();
  if (!response.ok) throw new Error(answer.error.message);
  return answer;
}

async function* ownAnswer(task, signal) {
  const asked = JSON.stringify(task.body.messages?.at(-1)?.content ?? "").split(/\s+/);
  const chunk = (delta, finish) => ({ choices: [{ index: 0, delta, finish_reason: finish ?? null }] });
  for (const [number, word] of asked.entries()) {
    await sleep(Number(values["pause-ms"]));
    signal.throwIfAborted();
    yield chunk({ content: `${number + 1}:${word.replaceAll('"', "")} ` });
  }
  yield { ...chunk({}, "stop"), usage: { prompt_tokens: asked.length, completion_tokens: asked.length } };
}

async function* serversAnswer(task, signal) {
  const headers = { "content-type": "application/json" };
  const response = await fetch(values.url + task.path, { method: "POST", headers, body: JSON.stringify(task.body), signal });
  if (!response.ok) throw Object.assign(new Error(await response.text()), { status: response.status });
  if (!task.stream) return yield { whole: await response.json() };
  for await (const line of lines(response.body)) {
    if (line.startsWith("data: {")) yield JSON.parse(line.slice(6));
  }
}

async function* lines(body) {
  const decoder = new TextDecoder();
  let kept = "";
  for await (const bytes of body) {
    const found = (kept + decoder.decode(bytes, { stream: true })).split(/\r?\n/);
    kept = found.pop();
    yield* found;
  }
}

// The lines of a result, all in one post: the mesh passes each on as it arrives.
async function* result(task, signal) {
  try {
    const answer = values.url ? serversAnswer : ownAnswer;
    for await (const part of answer(task, signal)) {
      yield part.whole ? { status: 200, body: part.whole } : { chunk: { data: part } };
      if (part.whole) return;
    }
    yield { chunk: { done: true } };
  } catch (error) {
    if (signal.aborted) throw error;
    yield { error: String(error.message), status: error.status ?? 500 };
  }
}

async function work(task) {
  if (running.has(task.task)) return; // it was sent again after a reconnect
  const controller = new AbortController();
  running.set(task.task, controller);
  async function* bytes() {
    for await (const line of result(task, controller.signal)) yield new TextEncoder().encode(`${JSON.stringify(line)}\n`);
  }
  const headers = { "content-type": "application/x-ndjson" };
  const body = ReadableStream.from(bytes());
  await call(`tasks/${task.task}/result`, null, { headers, body, duplex: "half", signal: controller.signal })
    .catch((error) => console.error(`${task.task}: ${error.message}`))
    .finally(() => running.delete(task.task));
}

async function serve() {
  const model = { name: values.model, pool: values.pool, slots: Number(values.slots), upstream_model: values["upstream-model"] };
  const registration = { name: values.name, models: [model] };
  const facts = await call("register", registration, {
    headers: { authorization: `Bearer ${process.env.WEFT_JOIN_TOKEN}` },
  });
  session = facts.session;
  console.log(`registered as ${facts.runner}`);
  const beats = setInterval(() => call("heartbeat", {}).catch(() => {}), facts.heartbeat_interval_seconds * 1000);
  try {
    const stream = await fetch(`${mesh}/stream`, { headers: { "weft-publisher-session": session } });
    let event = "";
    for await (const line of lines(stream.body)) {
      if (line.startsWith("event: ")) event = line.slice(7);
      if (!line.startsWith("data: ")) continue;
      const data = JSON.parse(line.slice(6));
      if (event === "task") work(data);
      if (event === "cancel") running.get(data.task)?.abort();
      if (event === "end") console.log(`ended: ${data.code}: ${data.message}`);
    }
  } finally {
    clearInterval(beats);
    for (const controller of running.values()) controller.abort();
  }
}

for (const name of ["SIGINT", "SIGTERM"]) {
  process.once(name, () => call("leave", { grace_seconds: 10 }).finally(() => setTimeout(() => process.exit(0), 1000)));
}
for (;;) {
  await serve().catch((error) => console.error(error.message, error.cause?.message ?? ""));
  await sleep(1000);
}
