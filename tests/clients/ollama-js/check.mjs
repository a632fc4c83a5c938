// ollama for JavaScript: Ollama's own library.
import assert from "node:assert/strict";
import { Ollama } from "ollama";
import {
  BROKEN, CUT, CUT_WORDS, KEY, MISSING, OPERATOR_KEY, PULLED, PULLED_BYTES, TALK, THINK, THINK_TEXT, THOUGHT, TOOLS, TOOLS_TEXT, URL,
  WEATHER_SCHEMA, breaksOff, fails, isTalk, run,
} from "./report.mjs";

const client = new Ollama({ host: URL, headers: { Authorization: `Bearer ${KEY}` } });
const messages = [{ role: "user", content: "Hello" }];
const weather = {
  type: "function",
  function: { name: "get_weather", description: "Weather of a city", parameters: WEATHER_SCHEMA },
};
const City = {
  type: "object",
  properties: { name: { type: "string" }, population: { type: "integer", minimum: 1 } },
  required: ["name", "population"],
};

async function collect(stream) {
  const parts = [];
  for await (const part of stream) parts.push(part);
  return parts;
}

async function talkText() {
  const answer = await client.chat({ model: TALK, messages, options: { num_predict: 32 } });
  isTalk(answer.message.content);
  assert.ok(answer.done && answer.eval_count > 0 && answer.total_duration > 0);
}

async function talkStream() {
  const parts = await collect(await client.chat({ model: TALK, messages, stream: true, options: { num_predict: 32 } }));
  isTalk(parts.map((part) => part.message.content).join(""));
  assert.ok(parts.at(-1).done);
}

async function talkTools() {
  const asked = await client.chat({ model: TOOLS, messages, tools: [weather] });
  const [call] = asked.message.tool_calls;
  assert.deepEqual([call.function.name, call.function.arguments], ["get_weather", { city: "Oslo" }]);
  const result = { role: "tool", tool_name: "get_weather", content: "sunny" };
  const answer = await client.chat({ model: TOOLS, messages: [...messages, asked.message, result], tools: [weather] });
  assert.equal(answer.message.content, TOOLS_TEXT);
}

async function talkStructured() {
  const answer = await client.chat({ model: TALK, messages, format: City });
  assert.deepEqual(JSON.parse(answer.message.content), { name: "tok0", population: 1 });
}

async function talkThinking() {
  const { message } = await client.chat({ model: THINK, messages, think: true });
  assert.deepEqual([message.thinking, message.content], [THOUGHT, THINK_TEXT]);
}

async function talkErrors() {
  const error = await fails(() => client.chat({ model: MISSING, messages }));
  assert.equal(error.status_code, 404);
  assert.match(error.message, new RegExp(MISSING));
}

async function talkKey() {
  const stranger = new Ollama({ host: URL, headers: { Authorization: "Bearer meant-to-fail" } });
  assert.equal((await fails(() => stranger.chat({ model: TALK, messages }))).status_code, 401);
}

async function talkAbort() {
  const stream = await client.chat({ model: TALK, messages, stream: true });
  stream.abort();
  const error = await fails(() => collect(stream));
  assert.equal(error.name, "AbortError");
}

async function talkBrokenStream() {
  await breaksOff(async () => collect(await client.chat({ model: BROKEN, messages, stream: true })));
}

async function talkCutAnswer() {
  await breaksOff(async () => collect(await client.chat({ model: CUT, messages, stream: true })), CUT_WORDS);
}

async function generateText() {
  isTalk((await client.generate({ model: TALK, prompt: "Hello" })).response);
}

async function generateStream() {
  const parts = await collect(await client.generate({ model: TALK, prompt: "Hello", stream: true }));
  isTalk(parts.map((part) => part.response).join(""));
}

async function embedVectors() {
  const { embeddings } = await client.embed({ model: TALK, input: ["a cat", "a kitten"] });
  assert.equal(embeddings.length, 2);
}

async function tagsList() {
  const { models } = await client.list();
  assert.ok(models.some((model) => model.name === TALK));
}

async function showModel() {
  const found = await client.show({ model: TALK });
  assert.ok(found.capabilities.includes("completion"));
}

async function psList() {
  await client.chat({ model: TALK, messages });
  assert.ok((await client.ps()).models.some((model) => model.name === TALK));
}

async function pullModel() {
  const operator = new Ollama({ host: URL, headers: { Authorization: `Bearer ${OPERATOR_KEY}` } });
  const parts = await collect(await operator.pull({ model: PULLED, stream: true }));
  assert.equal(parts.at(-1).status, "success");
  const last = parts.filter((part) => part.total).at(-1);
  assert.deepEqual([last.completed, last.total], [PULLED_BYTES, PULLED_BYTES]);
}

async function pullRefused() {
  // A key for the use of models pulls none.
  assert.equal((await fails(() => client.pull({ model: "hf:meant-to-fail/model" }))).status_code, 403);
}

await run({
  "talk.text": talkText,
  "talk.stream": talkStream,
  "talk.tools": talkTools,
  "talk.structured": talkStructured,
  "talk.thinking": talkThinking,
  "talk.errors": talkErrors,
  "talk.key": talkKey,
  "talk.abort": talkAbort,
  "talk.broken_stream": talkBrokenStream,
  "talk.cut_answer": talkCutAnswer,
  "generate.text": generateText,
  "generate.stream": generateStream,
  "embed.vectors": embedVectors,
  "tags.list": tagsList,
  "show.model": showModel,
  "ps.list": psList,
  "pull.model": pullModel,
  "pull.refused": pullRefused,
});
