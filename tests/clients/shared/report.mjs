// What the checks of Node clients share: the mesh's address and its scripted models, and one JSON line per feature.
// The same as report.py, where the models are described.
import assert from "node:assert/strict";

const env = process.env;
export const URL = env.WEFT_URL;
export const V1 = `${URL}/v1`;
export const KEY = env.WEFT_KEY;
export const OPERATOR_KEY = env.WEFT_OPERATOR_KEY;
export const PULLED = env.WEFT_PULLED;
export const PULLED_BYTES = Number(env.WEFT_PULLED_BYTES);

export const TALK = env.WEFT_TALK_MODEL;
export const TOOLS = "tools";
export const THINK = "think";
export const BROKEN = "broken";
export const CUT = "cut";
export const CUT_WORDS = /finish_reason 'abort'/;
export const PAINTER = "painter";
export const EARS = "ears";
export const VOICE = "voice";
export const BROKEN_PAINTER = "broken-painter";
export const MISSING = "no-such-model";

export const TALK_TEXT = env.WEFT_TALK_TEXT;
export const TOOLS_TEXT = "It is sunny in Oslo.";
export const THOUGHT = "Six times seven.";
export const THINK_TEXT = "The answer is 42.";

export const WEATHER_SCHEMA = {
  type: "object",
  properties: { city: { type: "string" } },
  required: ["city"],
  additionalProperties: false,
};

// Try each feature, or those that WEFT_FEATURES names, and print how it went.
export async function run(features) {
  const chosen = env.WEFT_FEATURES ? new Set(env.WEFT_FEATURES.split(",")) : null;
  for (const [feature, check] of Object.entries(features)) {
    if (chosen && !chosen.has(feature)) continue;
    let line;
    try {
      await check();
      line = { feature, ok: true };
    } catch (error) {
      console.error(error);
      line = { feature, ok: false, detail: String(error).slice(0, 500) };
    }
    console.log(JSON.stringify(line));
  }
}

export function isTalk(text) {
  if (TALK_TEXT) assert.equal(text, TALK_TEXT);
  else assert.ok(text?.trim(), `no words: ${text}`);
}

export async function fails(act) {
  try {
    await act();
  } catch (error) {
    return error;
  }
  throw new assert.AssertionError({ message: "it did not fail" });
}

// The error that a broken answer ends with, which says so in the words of the mesh.
export async function breaksOff(act, words = /before the answer was complete/) {
  const error = await fails(act);
  const said = `${error.message ?? ""} ${JSON.stringify(error)}`;
  assert.match(said, words);
  return error;
}
