// The AI SDK of Vercel, with its provider for OpenAI-compatible servers.
import assert from "node:assert/strict";
import { createOpenAI } from "@ai-sdk/openai";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { embedMany, generateText, Output, stepCountIs, streamText, tool } from "ai";
import { z } from "zod";
import {
  BROKEN, KEY, MISSING, TALK, THINK, THINK_TEXT, THOUGHT, TOOLS, TOOLS_TEXT, V1, breaksOff, fails, isTalk, run,
} from "./report.mjs";

const weft = createOpenAICompatible({
  name: "weft", baseURL: V1, apiKey: KEY, includeUsage: true, supportsStructuredOutputs: true,
});
const openai = createOpenAI({ baseURL: V1, apiKey: KEY });
const City = z.object({ name: z.string(), population: z.number().int().min(1) });
const prompt = "Hello";

function weather(cities) {
  return tool({
    description: "Weather of a city",
    inputSchema: z.object({ city: z.string() }),
    execute: async ({ city }) => { cities.push(city); return "sunny"; },
  });
}

async function chatText() {
  const { text, usage } = await generateText({ model: weft(TALK), prompt, maxOutputTokens: 32 });
  isTalk(text);
  assert.ok(usage.outputTokens > 0);
}

async function chatStream() {
  const result = streamText({ model: weft(TALK), prompt, maxOutputTokens: 32 });
  let text = "";
  for await (const delta of result.textStream) text += delta;
  isTalk(text);
  assert.ok((await result.usage).outputTokens > 0);
}

async function chatTools() {
  const cities = [];
  const { text, steps } = await generateText({
    model: weft(TOOLS), prompt, tools: { get_weather: weather(cities) }, stopWhen: stepCountIs(3),
  });
  assert.deepEqual([text, cities, steps.length], [TOOLS_TEXT, ["Oslo"], 2]);
}

async function chatToolStream() {
  const cities = [];
  const result = streamText({
    model: weft(TOOLS), prompt, tools: { get_weather: weather(cities) }, stopWhen: stepCountIs(3),
  });
  assert.equal(await result.text, TOOLS_TEXT);
  assert.deepEqual(cities, ["Oslo"]);
}

async function chatStructured() {
  const { output } = await generateText({ model: weft(TALK), prompt, output: Output.object({ schema: City }) });
  assert.deepEqual(output, { name: "tok0", population: 1 });
}

async function chatReasoning() {
  const { reasoningText, text } = await generateText({ model: weft(THINK), prompt });
  assert.deepEqual([reasoningText, text], [THOUGHT, THINK_TEXT]);
}

async function chatErrors() {
  const error = await fails(() => generateText({ model: weft(MISSING), prompt }));
  assert.equal(error.statusCode, 404);
  assert.match(error.message, /no-such-model/);
}

async function chatBrokenStream() {
  let text = "";
  await breaksOff(async () => {
    const result = streamText({ model: weft(BROKEN), prompt, onError: () => {} });
    for await (const part of result.fullStream) {
      if (part.type === "text-delta") text += part.text;
      if (part.type === "error") throw part.error;
    }
  });
  assert.ok(text);
}

async function responsesText() {
  isTalk((await generateText({ model: openai(TALK), prompt, maxOutputTokens: 32 })).text);
}

async function responsesStream() {
  const result = streamText({ model: openai(TALK), prompt, maxOutputTokens: 32 });
  let text = "";
  for await (const delta of result.textStream) text += delta;
  isTalk(text);
}

async function responsesTools() {
  const cities = [];
  const result = streamText({
    model: openai(TOOLS), prompt, tools: { get_weather: weather(cities) }, stopWhen: stepCountIs(3),
  });
  assert.equal(await result.text, TOOLS_TEXT);
  assert.deepEqual(cities, ["Oslo"]);
}

async function responsesStructured() {
  const { output } = await generateText({ model: openai(TALK), prompt, output: Output.object({ schema: City }) });
  assert.deepEqual(output, { name: "tok0", population: 1 });
}

async function embeddingsVectors() {
  const { embeddings } = await embedMany({ model: weft.embeddingModel(TALK), values: ["a cat", "a kitten"] });
  assert.equal(embeddings.length, 2);
  assert.ok(embeddings[0].length > 1);
}

await run({
  "chat.text": chatText,
  "chat.stream": chatStream,
  "chat.tools": chatTools,
  "chat.tool_stream": chatToolStream,
  "chat.structured": chatStructured,
  "chat.reasoning": chatReasoning,
  "chat.errors": chatErrors,
  "chat.broken_stream": chatBrokenStream,
  "responses.text": responsesText,
  "responses.stream": responsesStream,
  "responses.tools": responsesTools,
  "responses.structured": responsesStructured,
  "embeddings.vectors": embeddingsVectors,
});
