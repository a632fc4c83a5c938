// A web page of another origin, in Chromium: what its `fetch` may do, and what the browser keeps from it.
import assert from "node:assert/strict";
import { createServer } from "node:http";
import { chromium } from "playwright-core";
import { KEY, TALK, TALK_TEXT, URL, run } from "./report.mjs";

const { WEFT_BROWSER, WEFT_BROWSER_LIBRARIES, WEFT_ALLOWED_HOST, HTTP_PROXY, HTTPS_PROXY, ...env } = process.env;
// Chromium resolves these names to this machine: the pages come from a server of this check.
const HOSTS = { allowed: WEFT_ALLOWED_HOST, other: "elsewhere.test" };

const server = createServer((_, answer) => answer.setHeader("content-type", "text/html").end("<title>page</title>"));
await new Promise((listens) => server.listen(0, "127.0.0.1", listens));
const browser = await chromium.launch({
  executablePath: WEFT_BROWSER,
  args: [
    "--headless=shell",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-dev-shm-usage",
    `--host-resolver-rules=${Object.values(HOSTS).map((host) => `MAP ${host} 127.0.0.1`).join(",")}`,
  ],
  env: { ...env, LD_LIBRARY_PATH: WEFT_BROWSER_LIBRARIES },
});

// Runs in a page of that host: fetches, and reads the answer piece by piece.
async function fetched(host, path, body) {
  const page = await browser.newPage();
  try {
    await page.goto(`http://${host}:${server.address().port}/`);
    const options = {
      method: body ? "POST" : "GET",
      headers: { authorization: `Bearer ${KEY}`, ...(body ? { "content-type": "application/json" } : {}) },
      body: body && JSON.stringify(body),
    };
    return await page.evaluate(
      async ([url, options]) => {
        const answer = await fetch(url, options).catch((error) => ({ failed: String(error) }));
        if (answer.failed) return answer;
        const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
        let text = "";
        for (let part = await reader.read(); !part.done; part = await reader.read()) text += part.value;
        const { headers, status } = answer;
        return { status, text, type: headers.get("content-type"), request: headers.get("x-request-id") };
      },
      [URL + path, options],
    );
  } finally {
    await page.close();
  }
}

const CHAT = { model: TALK, stream: true, messages: [{ role: "user", content: "Hello" }] };

async function isKeptAway(path, body) {
  const answer = await fetched(HOSTS.other, `${path}?meant-to-fail`, body);
  assert.match(answer.failed ?? "", /Failed to fetch/);
}

await run({
  "models.list": async () => {
    const answer = await fetched(HOSTS.allowed, "/v1/models");
    assert.equal(answer.status, 200, answer.failed);
    assert.ok(JSON.parse(answer.text).data.some((model) => model.id === TALK));
    assert.ok(answer.request, "the page cannot read x-request-id");
  },
  "models.other_origin": () => isKeptAway("/v1/models"),
  "chat.stream": async () => {
    const answer = await fetched(HOSTS.allowed, "/v1/chat/completions", CHAT);
    assert.match(answer.type ?? "", /^text\/event-stream/, answer.failed);
    const events = answer.text.split("\n").filter((line) => line.startsWith("data: {"));
    const pieces = events.flatMap((line) => JSON.parse(line.slice(6)).choices ?? []);
    assert.equal(pieces.map((piece) => piece.delta.content ?? "").join(""), TALK_TEXT);
  },
  "chat.other_origin": () => isKeptAway("/v1/chat/completions", CHAT),
  "talk.stream": async () => {
    const answer = await fetched(HOSTS.allowed, "/api/chat", CHAT);
    assert.equal(answer.type, "application/x-ndjson", answer.failed);
    const lines = answer.text.trim().split("\n").map((line) => JSON.parse(line));
    assert.equal(lines.map((line) => line.message.content).join(""), TALK_TEXT);
  },
});
await browser.close();
server.close();
