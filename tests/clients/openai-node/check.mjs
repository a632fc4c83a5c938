// openai for Node: the client most JavaScript tools are built on.
import assert from "node:assert/strict";
import OpenAI, { toFile } from "openai";
import { zodResponseFormat, zodTextFormat } from "openai/helpers/zod";
import { z } from "zod";
import {
  BROKEN, BROKEN_PAINTER, CUT, CUT_WORDS, EARS, KEY, MISSING, PAINTER, TALK, THINK, THINK_TEXT, THOUGHT, TOOLS, TOOLS_TEXT, V1, VOICE, WEATHER_SCHEMA, breaksOff,
  fails, isTalk, run,
} from "./report.mjs";

const client = new OpenAI({ baseURL: V1, apiKey: KEY });
const messages = [{ role: "user", content: "Hello" }];
const weather = {
  type: "function",
  function: { name: "get_weather", description: "Weather of a city", parameters: WEATHER_SCHEMA, strict: true },
};
const City = z.object({ name: z.string(), population: z.number().int().min(1) });

async function chatText() {
  const answer = await client.chat.completions.create({ model: TALK, messages, max_tokens: 32 });
  isTalk(answer.choices[0].message.content);
  assert.ok(answer.usage.completion_tokens > 0);
  assert.ok(answer._request_id);
}

async function chatStream() {
  const stream = client.chat.completions.stream({
    model: TALK, messages, max_tokens: 32, stream_options: { include_usage: true },
  });
  let deltas = "";
  stream.on("content", (delta) => (deltas += delta));
  const final = await stream.finalChatCompletion();
  isTalk(deltas);
  assert.equal(final.choices[0].message.content, deltas);
  assert.ok(final.usage.completion_tokens > 0);
}

async function chatTools() {
  const asked = await client.chat.completions.create({ model: TOOLS, messages, tools: [weather] });
  const { message, finish_reason } = asked.choices[0];
  assert.equal(finish_reason, "tool_calls");
  assert.deepEqual(JSON.parse(message.tool_calls[0].function.arguments), { city: "Oslo" });
  const result = { role: "tool", tool_call_id: message.tool_calls[0].id, content: "sunny" };
  const answer = await client.chat.completions.create({
    model: TOOLS, messages: [...messages, message, result], tools: [weather],
  });
  assert.equal(answer.choices[0].message.content, TOOLS_TEXT);
}

async function chatRunner() {
  const cities = [];
  const getWeather = (input) => { cities.push(input.city); return "sunny"; };
  const runner = client.chat.completions.runTools({
    model: TOOLS, messages, stream: true,
    tools: [{
      type: "function",
      function: { ...weather.function, name: "get_weather", function: getWeather, parse: JSON.parse },
    }],
  });
  assert.equal(await runner.finalContent(), TOOLS_TEXT);
  assert.deepEqual(cities, ["Oslo"]);
}

async function chatStructured() {
  const answer = await client.chat.completions.parse({
    model: TALK, messages, response_format: zodResponseFormat(City, "city"),
  });
  assert.deepEqual(answer.choices[0].message.parsed, { name: "tok0", population: 1 });
}

async function chatReasoning() {
  const { message } = (await client.chat.completions.create({ model: THINK, messages })).choices[0];
  assert.deepEqual([message.reasoning_content, message.content], [THOUGHT, THINK_TEXT]);
}

async function chatErrors() {
  const error = await fails(() => client.chat.completions.create({ model: MISSING, messages }));
  assert.ok(error instanceof OpenAI.NotFoundError);
  assert.equal(error.code, "model_not_found");
  assert.ok(error.requestID);
}

async function chatKey() {
  const stranger = new OpenAI({ baseURL: V1, apiKey: "meant-to-fail" });
  const error = await fails(() => stranger.chat.completions.create({ model: TALK, messages }));
  assert.ok(error instanceof OpenAI.AuthenticationError);
}

async function chatBrokenStream() {
  const got = [];
  const error = await breaksOff(async () => {
    const stream = await client.chat.completions.create({ model: BROKEN, messages, stream: true });
    for await (const chunk of stream) got.push(chunk);
  });
  assert.ok(error instanceof OpenAI.APIError);
  assert.ok(got.length);
}

async function chatCutAnswer() {
  await breaksOff(async () => {
    const stream = await client.chat.completions.create({ model: CUT, messages, stream: true });
    for await (const chunk of stream) assert.equal(chunk.choices[0]?.finish_reason ?? null, null);
  }, CUT_WORDS);
}

async function embeddingsVectors() {
  const input = ["a cat", "a kitten"];
  const packed = await client.embeddings.create({ model: TALK, input });
  const floats = await client.embeddings.create({ model: TALK, input, encoding_format: "float" });
  assert.equal(packed.data.length, 2);
  assert.deepEqual(packed.data[1].embedding, floats.data[1].embedding.map(Math.fround));
}

async function responsesText() {
  const answer = await client.responses.create({ model: TALK, input: "Hello", max_output_tokens: 32 });
  isTalk(answer.output_text);
  assert.ok(answer.usage.output_tokens > 0);
}

async function responsesStream() {
  const stream = client.responses.stream({ model: TALK, input: "Hello", max_output_tokens: 32 });
  let deltas = "";
  stream.on("response.output_text.delta", (event) => (deltas += event.delta));
  const final = await stream.finalResponse();
  isTalk(deltas);
  assert.equal(final.output_text, deltas);
}

async function responsesTools() {
  const tools = [{ type: "function", ...weather.function }];
  const stream = client.responses.stream({ model: TOOLS, input: "How is the weather in Oslo?", tools });
  const asked = await stream.finalResponse();
  const [call] = asked.output;
  assert.deepEqual([call.type, call.parsed_arguments], ["function_call", { city: "Oslo" }]);
  const input = [{ type: "function_call_output", call_id: call.call_id, output: "sunny" }];
  const answer = await client.responses.create({ model: TOOLS, input, tools, previous_response_id: asked.id });
  assert.equal(answer.output_text, TOOLS_TEXT);
}

async function responsesStructured() {
  const answer = await client.responses.parse({
    model: TALK, input: "Which city?", text: { format: zodTextFormat(City, "city") },
  });
  assert.deepEqual(answer.output_parsed, { name: "tok0", population: 1 });
}

async function responsesBrokenStream() {
  const got = [];
  await breaksOff(async () => {
    const stream = await client.responses.create({ model: BROKEN, input: "Hello", stream: true });
    for await (const event of stream) {
      if (event.type === "response.output_text.delta") got.push(event.delta);
      if (event.type === "response.failed") throw new Error(event.response.error.message);
    }
  });
  assert.ok(got.length);
}

async function responsesCutAnswer() {
  await breaksOff(async () => {
    const stream = await client.responses.create({ model: CUT, input: "Hello", stream: true });
    for await (const event of stream) {
      assert.notEqual(event.type, "response.completed");
      if (event.type === "response.failed") throw new Error(event.response.error.message);
    }
  }, CUT_WORDS);
}

const PNG = Buffer.from(
  "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAQAAAC1HAwCAAAAC0lEQVR42mNkYAAAAAYAAjCB0C8AAAAASUVORK5CYII=", "base64",
);
const picture = () => toFile(PNG, "cat.png", { type: "image/png" });
const sound = () => toFile(Buffer.from("0123456789"), "talk.wav", { type: "audio/wav" });
const isPicture = (text) => assert.equal(Buffer.from(text, "base64").toString("latin1", 1, 4), "PNG");

async function collected(stream) {
  const events = [];
  for await (const event of await stream) events.push(event);
  return events;
}

async function imagesSeveral() {
  const answer = await client.images.generate({ model: PAINTER, prompt: "a cat", n: 2, output_format: "png", seed: 7 });
  assert.equal(answer.data.length, 2);
  answer.data.forEach((image) => isPicture(image.b64_json));
  assert.deepEqual([answer.size, answer.output_format], ["1x1", "png"]);
  assert.ok(answer.usage.input_tokens > 0);
}

async function imagesStream() {
  const events = await collected(
    client.images.generate({ model: PAINTER, prompt: "a cat", stream: true, partial_images: 2 }),
  );
  assert.deepEqual(events.map((event) => event.type), [
    "image_generation.partial_image", "image_generation.partial_image", "image_generation.completed",
  ]);
  events.forEach((event) => isPicture(event.b64_json));
  assert.ok(events[2].usage.input_tokens > 0);
}

async function imagesErrors() {
  const missing = await fails(() => client.images.generate({ model: MISSING, prompt: "a cat" }));
  assert.ok(missing instanceof OpenAI.NotFoundError);
  const wrong = await fails(() => client.images.generate({ model: PAINTER, prompt: "a cat", size: "meant-to-fail" }));
  assert.ok(wrong instanceof OpenAI.BadRequestError);
  assert.equal(wrong.param, "size");
}

async function imagesBrokenStream() {
  const got = [];
  const error = await breaksOff(async () => {
    const stream = await client.images.generate({
      model: BROKEN_PAINTER, prompt: "a", stream: true, partial_images: 2,
    });
    for await (const event of stream) got.push(event.type);
  });
  assert.ok(error instanceof OpenAI.APIError);
  assert.deepEqual(got, ["image_generation.partial_image"]);
}

async function editsFiles() {
  const image = [await picture(), await picture()];
  const answer = await client.images.edit({ model: PAINTER, prompt: "a hat", image, mask: await picture() });
  isPicture(answer.data[0].b64_json);
}

async function editsStream() {
  const events = await collected(
    client.images.edit({ model: PAINTER, prompt: "a hat", image: await picture(), stream: true, partial_images: 1 }),
  );
  assert.deepEqual(events.map((event) => event.type), ["image_edit.partial_image", "image_edit.completed"]);
}

async function transcriptionsText() {
  const answer = await client.audio.transcriptions.create({ model: EARS, file: await sound() });
  assert.equal(answer.text, "10 bytes of sound");
}

async function transcriptionsWords() {
  const answer = await client.audio.transcriptions.create({
    model: EARS, file: await sound(), response_format: "verbose_json", timestamp_granularities: ["word", "segment"],
  });
  assert.deepEqual(answer.words.map((word) => word.word), ["10", "bytes", "of", "sound"]);
  assert.equal(answer.segments[1].end, 2);
}

async function transcriptionsCaptions() {
  const captions = await client.audio.transcriptions.create({ model: EARS, file: await sound(), response_format: "vtt" });
  assert.ok(captions.startsWith("WEBVTT\n\n00:00:00.000 --> 00:00:01.000\n"), captions);
}

async function transcriptionsStream() {
  const events = await collected(client.audio.transcriptions.create({ model: EARS, file: await sound(), stream: true }));
  const deltas = events.filter((event) => event.type === "transcript.text.delta").map((event) => event.delta);
  assert.equal(deltas.join(""), "10 bytes of sound");
  assert.equal(events.at(-1).text, "10 bytes of sound");
}

async function translationsText() {
  const answer = await client.audio.translations.create({ model: EARS, file: await sound() });
  assert.equal(answer.text, "10 bytes in English");
}

const isRecording = (bytes) => assert.equal(Buffer.from(bytes).toString("latin1", 0, 4), "RIFF");

async function speechBytes() {
  const answer = await client.audio.speech.create({ model: VOICE, input: "one two", voice: "alloy" });
  isRecording(await answer.arrayBuffer());
}

async function speechStream() {
  const answer = await client.audio.speech.create({ model: VOICE, input: "one two", voice: "alloy", speed: 1.5 });
  assert.equal(answer.headers.get("content-type"), "audio/wav");
  const pieces = [];
  for await (const piece of answer.body) pieces.push(Buffer.from(piece));
  isRecording(Buffer.concat(pieces));
}

async function modelsList() {
  const names = [];
  for await (const model of client.models.list()) names.push(model.id);
  assert.ok(names.includes(TALK));
}

await run({
  "chat.text": chatText,
  "chat.stream": chatStream,
  "chat.tools": chatTools,
  "chat.runner": chatRunner,
  "chat.structured": chatStructured,
  "chat.reasoning": chatReasoning,
  "chat.errors": chatErrors,
  "chat.key": chatKey,
  "chat.broken_stream": chatBrokenStream,
  "chat.cut_answer": chatCutAnswer,
  "embeddings.vectors": embeddingsVectors,
  "responses.text": responsesText,
  "responses.stream": responsesStream,
  "responses.tools": responsesTools,
  "responses.structured": responsesStructured,
  "responses.broken_stream": responsesBrokenStream,
  "responses.cut_answer": responsesCutAnswer,
  "images.several": imagesSeveral,
  "images.stream": imagesStream,
  "images.errors": imagesErrors,
  "images.broken_stream": imagesBrokenStream,
  "edits.files": editsFiles,
  "edits.stream": editsStream,
  "transcriptions.text": transcriptionsText,
  "transcriptions.words": transcriptionsWords,
  "transcriptions.captions": transcriptionsCaptions,
  "transcriptions.stream": transcriptionsStream,
  "translations.text": translationsText,
  "speech.bytes": speechBytes,
  "speech.stream": speechStream,
  "models.list": modelsList,
});
