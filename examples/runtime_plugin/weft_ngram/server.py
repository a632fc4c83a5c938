"""A small server with OpenAI's interface: it continues a prompt by the word n-grams of a text.

Run `python -m weft_ngram.server --text FILE`. It prints where it listens, which is what the backend waits for.
"""

import argparse
import asyncio
import json
import os
import random
import socket
import sys
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from aiohttp import web

MAX_CHOICES = 8
MAX_BODY_BYTES = 4 * 1024 * 1024


class NgramModel:
    """Which words follow which, by frequency in a text."""

    def __init__(self, text: str, order: int) -> None:
        self._order = order
        self._words = text.split()
        self._next: defaultdict[tuple[str, ...], list[str]] = defaultdict(list)
        for length in range(order + 1):
            for index in range(len(self._words) - length):
                self._next[tuple(self._words[index : index + length])].append(self._words[index + length])

    def continuation(self, prompt: str, chance: random.Random, *, greedy: bool) -> Iterator[str]:
        """The words that follow a prompt, without an end; the longest known context decides."""
        words = prompt.split()
        while True:
            known = (self._next.get(tuple(words[len(words) - n :])) for n in range(self._order, -1, -1))
            choices = next(found for found in known if found)
            word = max(sorted(set(choices)), key=choices.count) if greedy else chance.choice(choices)
            words = [*words, word][-self._order :]
            yield word


class Server:
    """The routes of one model."""

    def __init__(self, model: NgramModel, options: argparse.Namespace) -> None:
        self._model = model
        self._context_tokens: int = options.context_tokens
        self._pause = 1.0 / options.tokens_per_second
        self._key = os.environ.get("NGRAM_API_KEY", "")

    def app(self) -> web.Application:
        """The application."""
        app = web.Application(client_max_size=MAX_BODY_BYTES)
        app.router.add_get("/health", self._health)
        app.router.add_get("/v1/models", self._models)
        app.router.add_post("/v1/chat/completions", self._chat)
        app.router.add_post("/v1/completions", self._completion)
        return app

    async def _health(self, _: web.Request) -> web.Response:
        return web.json_response({"status": "ok"})

    async def _models(self, _: web.Request) -> web.Response:
        return web.json_response({"data": [{"id": "ngram"}]})

    async def _chat(self, request: web.Request) -> web.StreamResponse:
        body = await self._body(request)
        texts = [_text(message.get("content")) for message in body.get("messages", [])]
        return await self._stream(request, body, [" ".join(texts)], is_chat=True)

    async def _completion(self, request: web.Request) -> web.StreamResponse:
        body = await self._body(request)
        prompt = body.get("prompt", "")
        prompts = prompt if isinstance(prompt, list) else [prompt]
        if not all(isinstance(each, str) for each in prompts):
            raise _refusal(400, "token ids are not understood", "invalid_request_error")
        return await self._stream(request, body, prompts, is_chat=False)

    async def _body(self, request: web.Request) -> dict[str, Any]:
        if self._key and request.headers.get("Authorization") != f"Bearer {self._key}":
            raise _refusal(401, "wrong key", "authentication_error")
        body = await request.json()
        return body if isinstance(body, dict) else {}

    async def _stream(
        self, request: web.Request, body: dict[str, Any], prompts: list[str], *, is_chat: bool
    ) -> web.StreamResponse:
        prompt_tokens = sum(len(prompt.split()) for prompt in prompts)
        room = self._context_tokens - max(len(prompt.split()) for prompt in prompts)
        if room <= 0:
            raise _refusal(400, f"the context is {self._context_tokens} tokens", "context_length_exceeded")
        most = min(room, int(body.get("max_tokens") or room))
        stop = body.get("stop") or []
        stops = [stop] if isinstance(stop, str) else list(stop)
        greedy = body.get("temperature") == 0
        chance = random.Random(body.get("seed"))  # noqa: S311 - words of a text, not secrets
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        written = 0
        for index, prompt in enumerate(each for each in prompts for _ in range(min(body.get("n") or 1, MAX_CHOICES))):
            finish, text = "length", ""
            for word in _first(self._model.continuation(prompt, chance, greedy=greedy), most):
                written += 1
                piece = f"{word} "
                text += piece
                if any(stop in text for stop in stops):
                    finish = "stop"
                    break
                await _send(response, {"choices": [_choice(index, piece, None, is_chat=is_chat)]})
                await asyncio.sleep(self._pause)
            await _send(response, {"choices": [_choice(index, "", finish, is_chat=is_chat)]})
        usage = {"prompt_tokens": prompt_tokens, "completion_tokens": written, "total_tokens": prompt_tokens + written}
        await _send(response, {"choices": [], "usage": usage})
        await response.write(b"data: [DONE]\n\n")
        return response


def _first(words: Iterator[str], most: int) -> Iterator[str]:
    for _, word in zip(range(most), words, strict=False):
        yield word


def _choice(index: int, text: str, finish: str | None, *, is_chat: bool) -> dict[str, Any]:
    content: dict[str, Any] = {"delta": {"content": text} if text else {}} if is_chat else {"text": text}
    return {"index": index, **content, "finish_reason": finish}


async def _send(response: web.StreamResponse, chunk: dict[str, Any]) -> None:
    await response.write(f"data: {json.dumps(chunk)}\n\n".encode())


def _text(content: Any) -> str:
    if isinstance(content, list):
        return " ".join(str(part.get("text", "")) for part in content if isinstance(part, dict))
    return str(content or "")


def _refusal(status: int, message: str, code: str) -> web.HTTPException:
    kinds = {400: web.HTTPBadRequest, 401: web.HTTPUnauthorized}
    text = json.dumps({"error": {"message": message, "type": code, "code": code}})
    return kinds[status](text=text, content_type="application/json")


async def _serve(server: Server, port: int) -> None:
    runner = web.AppRunner(server.app(), handle_signals=True, access_log=None)
    await runner.setup()
    with socket.socket() as listening:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.bind(("127.0.0.1", port))
        await web.SockSite(runner, listening).start()
        print(f"listening on http://127.0.0.1:{listening.getsockname()[1]}", flush=True)
        await asyncio.Event().wait()


def main() -> None:
    """Read the text, then serve until a signal comes."""
    parser = argparse.ArgumentParser(prog="weft_ngram.server", description=__doc__)
    parser.add_argument("--text", type=Path, required=True, help="the text to learn from")
    parser.add_argument("--order", type=int, default=2, help="words that the next one depends on")
    parser.add_argument("--port", type=int, default=0, help="0: any free one")
    parser.add_argument("--context-tokens", type=int, default=2048)
    parser.add_argument("--tokens-per-second", type=float, default=200.0)
    options = parser.parse_args()
    text = options.text.read_text(encoding="utf-8", errors="replace")
    if not text.split():
        print(f"{options.text} has no words", file=sys.stderr)
        raise SystemExit(3)
    print(f"learning from {len(text.split())} words of {options.text}", flush=True)
    try:
        asyncio.run(_serve(Server(NgramModel(text, options.order), options), options.port))
    except KeyboardInterrupt:
        raise SystemExit(0) from None


if __name__ == "__main__":
    main()
