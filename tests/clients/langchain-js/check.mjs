// LangChain's OpenAI classes for JavaScript.
import assert from "node:assert/strict";
import { HumanMessage, ToolMessage } from "@langchain/core/messages";
import { tool } from "@langchain/core/tools";
import { ChatOpenAI, OpenAIEmbeddings } from "@langchain/openai";
import { z } from "zod";
import {
  BROKEN, KEY, MISSING, TALK, TOOLS, TOOLS_TEXT, V1, breaksOff, fails, isTalk, run,
} from "./report.mjs";

const configuration = { baseURL: V1 };
const City = z.object({ name: z.string(), population: z.number().int().min(1) });
const getWeather = tool(async ({ city }) => `sunny in ${city}`, {
  name: "get_weather", description: "Weather of a city", schema: z.object({ city: z.string() }),
});

function model(name, options = {}) {
  return new ChatOpenAI({ model: name, apiKey: KEY, configuration, maxRetries: 0, ...options });
}

async function chatText() {
  const answer = await model(TALK, { maxTokens: 32 }).invoke([["system", "Be brief."], ["human", "Hello"]]);
  isTalk(answer.content);
  assert.ok(answer.usage_metadata.output_tokens > 0);
}

async function chatStream() {
  let whole;
  for await (const chunk of await model(TALK, { maxTokens: 32 }).stream("Hello")) {
    whole = whole ? whole.concat(chunk) : chunk;
  }
  isTalk(whole.content);
  assert.ok(whole.usage_metadata.output_tokens > 0);
}

async function chatTools() {
  const bound = model(TOOLS).bindTools([getWeather]);
  const messages = [new HumanMessage("How is the weather in Oslo?")];
  const asked = await bound.invoke(messages);
  assert.deepEqual(asked.tool_calls.map(({ name, args }) => [name, args]), [["get_weather", { city: "Oslo" }]]);
  const result = await getWeather.invoke(asked.tool_calls[0]);
  assert.ok(result instanceof ToolMessage);
  assert.equal((await bound.invoke([...messages, asked, result])).content, TOOLS_TEXT);
}

async function chatStructured() {
  const answer = await model(TALK).withStructuredOutput(City, { name: "city", method: "jsonSchema" }).invoke("Which?");
  assert.deepEqual(answer, { name: "tok0", population: 1 });
}

async function chatErrors() {
  const error = await fails(() => model(MISSING).invoke("Hello"));
  assert.equal(error.status, 404);
}

async function chatBrokenStream() {
  const got = [];
  await breaksOff(async () => {
    for await (const chunk of await model(BROKEN).stream("Hello")) got.push(chunk);
  });
  assert.ok(got.length);
}

async function responsesText() {
  isTalk((await model(TALK, { maxTokens: 32, useResponsesApi: true }).invoke("Hello")).text);
}

async function responsesStream() {
  let whole;
  for await (const chunk of await model(TALK, { maxTokens: 32, useResponsesApi: true }).stream("Hello")) {
    whole = whole ? whole.concat(chunk) : chunk;
  }
  isTalk(whole.text);
}

async function responsesTools() {
  const bound = model(TOOLS, { useResponsesApi: true }).bindTools([getWeather]);
  const messages = [new HumanMessage("How is the weather in Oslo?")];
  const asked = await bound.invoke(messages);
  assert.deepEqual(asked.tool_calls.map(({ name, args }) => [name, args]), [["get_weather", { city: "Oslo" }]]);
  const result = await getWeather.invoke(asked.tool_calls[0]);
  assert.equal((await bound.invoke([...messages, asked, result])).text, TOOLS_TEXT);
}

async function embeddingsVectors() {
  const embedder = new OpenAIEmbeddings({ model: TALK, apiKey: KEY, configuration });
  const vectors = await embedder.embedDocuments(["a cat", "a kitten"]);
  assert.equal(vectors.length, 2);
  assert.ok(vectors[0].length > 1);
}

await run({
  "chat.text": chatText,
  "chat.stream": chatStream,
  "chat.tools": chatTools,
  "chat.structured": chatStructured,
  "chat.errors": chatErrors,
  "chat.broken_stream": chatBrokenStream,
  "responses.text": responsesText,
  "responses.stream": responsesStream,
  "responses.tools": responsesTools,
  "embeddings.vectors": embeddingsVectors,
});
