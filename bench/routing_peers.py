"""First tokens through real routers: weft, smg and vllm-router before the same eight engines, in one run.

The engines and callers of `bench.routing`, over HTTP: an engine has a prefix cache, one prefill at a time and eight
slots, and its costs are sleeps, so that the times depend on the router and not on this machine's speed. All routers
have their default settings, and no request names its session.

    python -m bench.routing_peers [--only weft] [--seed 1]
"""

import argparse
import asyncio
import json
import random
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

import aiohttp
import msgspec
from aiohttp import web

from bench.contender import SMG, VLLM_ROUTER, WEFT, Contender, ensure_installed
from bench.launch import LaunchError, answering, get, started
from bench.load import percentile
from bench.sessions import (
    ANSWER_TOKENS,
    ENGINES,
    SLOTS,
    TOKEN_SECONDS,
    USER_CHARS,
    Engine,
    Workload,
    blocks_of,
    engines_of,
    system_prompt,
    words,
)
from weft.kernel.requests.request_values import CHARS_PER_TOKEN
from weft_testing.free_port import free_port

MODEL = "stub"
START_SECONDS = 30.0
ALONE_REQUESTS = 30
"""Requests of one caller, one after another."""


class HttpEngine:
    """An engine of `bench.routing` behind HTTP."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self._slots, self._prefill = asyncio.Semaphore(SLOTS), asyncio.Lock()

    async def chat(self, request: web.Request) -> web.StreamResponse:
        """Streams an answer of as many tokens as the request allows."""
        prompt = Prompt(await request.json())
        async with self._slots:
            async with self._prefill:
                cached = self.engine.cached(prompt.blocks)
                await asyncio.sleep((prompt.tokens - cached) * self.engine.token_seconds)
                self.engine.store(prompt.blocks)
            return await self._stream(request, prompt, cached)

    async def _stream(self, request: web.Request, prompt: "Prompt", cached: int) -> web.StreamResponse:
        body, count = prompt.body, int(prompt.body.get("max_tokens") or 16)
        tokens = {"prompt_tokens": prompt.tokens, "completion_tokens": count, "total_tokens": prompt.tokens + count}
        usage = {**tokens, "prompt_tokens_details": {"cached_tokens": cached}}
        head = {"id": "c", "object": "chat.completion.chunk", "created": 1, "model": body["model"]}
        if not body.get("stream"):
            message = {"role": "assistant", "content": "word " * count}
            choice = {"index": 0, "message": message, "finish_reason": "stop"}
            return web.json_response({**head, "object": "chat.completion", "choices": [choice], "usage": usage})
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)

        async def send(**fields: object) -> None:
            await response.write(b"data: " + msgspec.json.encode({**head, **fields}) + b"\n\n")

        for number in range(count):
            if number:
                await asyncio.sleep(TOKEN_SECONDS * self.engine.slowdown)
            await send(choices=[{"index": 0, "delta": {"role": "assistant", "content": "word "}}])
        await send(choices=[{"index": 0, "delta": {}, "finish_reason": "stop"}])
        await send(choices=[], usage=usage)
        await response.write(b"data: [DONE]\n\n")
        return response


class Prompt:
    """A chat request, as an engine's cache sees it."""

    def __init__(self, body: dict[str, Any]) -> None:
        text = "".join(f"<{message['role']}>{message['content']}\n" for message in body["messages"])
        self.body, self.tokens, self.blocks = body, int(len(text) / CHARS_PER_TOKEN), blocks_of(text)


async def serve(ports: list[int], workload: Workload) -> None:
    """Serves the engines at these ports, until the process ends."""
    for port, engine in zip(ports, engines_of(workload), strict=True):
        await _listen(port, HttpEngine(engine).chat)
    await asyncio.Event().wait()


async def _listen(port: int, chat: Callable[[web.Request], Awaitable[web.StreamResponse]]) -> None:
    async def models(_: web.Request) -> web.Response:
        found = {"id": MODEL, "object": "model", "created": 1, "owned_by": "bench", "max_model_len": 32_768}
        return web.json_response({"object": "list", "data": [found]})

    async def healthy(_: web.Request) -> web.Response:
        # What the other routers ask their workers.
        return web.json_response({"status": "ok", "model_path": MODEL, "served_model_name": MODEL})

    app = web.Application(client_max_size=64 * 1024 * 1024)
    paths = ("/health", "/model_info", "/get_model_info", "/server_info", "/get_server_info")
    app.add_routes([web.post("/v1/chat/completions", chat), web.get("/v1/models", models)])
    app.add_routes([web.get(path, healthy) for path in paths])
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", port).start()


@contextmanager
def serving(workload: Workload, folder: Path) -> Iterator[list[int]]:
    """The engines in a process of their own; yields their ports. Raises LaunchError."""
    ports = [free_port() for _ in range(ENGINES)]
    job = json.dumps({"ports": ports, "workload": msgspec.to_builtins(workload)})
    root = str(Path(__file__).parents[1])
    with started([sys.executable, "-m", "bench.routing_peers", "--serve", job], {"PYTHONPATH": root}, folder / "log"):
        deadline = time.monotonic() + START_SECONDS
        while not _is_healthy(ports[-1]):
            if time.monotonic() > deadline:
                raise LaunchError(f"the engines did not start in {START_SECONDS:g} s")
            time.sleep(0.05)
        yield ports


def _is_healthy(port: int) -> bool:
    with suppress(OSError, LaunchError):
        return bool(get(port, "/health", {}))
    return False


def contenders(ports: list[int]) -> list[Contender]:
    """The routers with their default policies before engines at these ports."""
    urls = [f"http://127.0.0.1:{port}" for port in ports]
    models = "".join(
        f'      - {{name: stub-{number}, pool: {MODEL}, url: "{url}", upstream_model: {MODEL}, slots: {SLOTS}}}\n'
        for number, url in enumerate(urls)
    )
    weft = f"port: {{port}}\nrunners:\n  - name: bench\n    runtime: openai_http\n    models:\n{models}"
    others = []
    for peer in (SMG, VLLM_ROUTER):
        at = peer.command.index("--worker-urls")
        # Without their policy, which the other bench names.
        end = at + 4 if peer.command[at + 2] == "--policy" else at + 2
        others.append(replace(peer, command=(*peer.command[: at + 1], *urls, *peer.command[end:])))
    return [replace(WEFT, config=weft, key_command=(), ready_path="/health"), *others]


class Callers:
    """The sessions of a workload, against one address."""

    def __init__(self, workload: Workload, port: int) -> None:
        self._work = workload
        self._url = f"http://127.0.0.1:{port}/v1/chat/completions"
        self.firsts: list[float] = []
        self.prompt_tokens = self.cached_tokens = self.failures = 0

    async def run(self) -> None:
        """Play all sessions."""
        timeout = aiohttp.ClientTimeout(total=300)
        async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0), timeout=timeout) as http:
            await asyncio.gather(*(self._session(http, number) for number in range(self._work.sessions)))

    async def alone(self) -> float:
        """Returns the median seconds to the first token of requests with a short prompt, one after another."""
        async with aiohttp.ClientSession() as http:
            for _ in range(ALONE_REQUESTS):
                await self._ask(http, [{"role": "user", "content": "Hi"}], 1)
        return median(self.firsts)

    async def _session(self, http: aiohttp.ClientSession, number: int) -> None:
        await asyncio.sleep(random.Random(number).random() * 3)  # noqa: S311 - a workload
        chance, system = system_prompt(self._work, number)
        messages = [{"role": "system", "content": system}]
        for _ in range(self._work.turns):
            messages.append({"role": "user", "content": words(chance.choice(USER_CHARS), chance)})
            answer = await self._ask(http, messages, chance.choice(ANSWER_TOKENS))
            messages.append({"role": "assistant", "content": answer})
            await asyncio.sleep(0.2 + chance.random())

    async def _ask(self, http: aiohttp.ClientSession, messages: list[dict[str, str]], tokens: int) -> str:
        began, first, texts, usage = time.perf_counter(), None, list[str](), dict[str, object]()
        body: dict[str, object] = {"model": MODEL, "messages": messages, "max_tokens": tokens, "stream": True}
        try:
            async with http.post(self._url, json=body | {"stream_options": {"include_usage": True}}) as response:
                async for line in response.content:
                    if not line.startswith(b"data: {"):
                        continue
                    event = json.loads(line[6:])
                    usage = event.get("usage") or usage
                    for choice in event.get("choices", ()):
                        if text := choice.get("delta", {}).get("content"):
                            first = first or time.perf_counter()
                            texts.append(text)
        except (aiohttp.ClientError, TimeoutError):
            first = None
        if first is None:
            self.failures += 1
            return ""
        self.firsts.append(first - began)
        details = msgspec.convert(usage.get("prompt_tokens_details") or {}, dict[str, int])
        self.prompt_tokens += int(str(usage.get("prompt_tokens", 0)))
        self.cached_tokens += details.get("cached_tokens", 0)
        return "".join(texts)


def main() -> None:
    """Print a table of all workloads and routers."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", action="append", default=[], help="a router; may be repeated")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--serve", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.serve:
        job = json.loads(given.serve)
        asyncio.run(serve(job["ports"], msgspec.convert(job["workload"], Workload)))
        return
    root = Path(__file__).parents[1]
    print("| workload | router | p50 ms | p95 | cached share | alone ms | failures |\n|---|---|---|---|---|---|---|")
    for ms in (0.1, 0.4):
        usual = Workload(prefill_ms=ms, seed=given.seed)
        workloads = {
            f"{ms} ms per prompt token": usual,
            f"{ms} ms, unequal engines": replace(usual, unequal=True),
            f"{ms} ms, Zipf 1.1": replace(usual, zipf=True),
            f"{ms} ms, 160 sessions": replace(usual, sessions=160),
        }
        for title, workload in workloads.items():
            for name in (WEFT.name, SMG.name, VLLM_ROUTER.name):
                if not given.only or name in given.only:
                    _run(title, workload, name, root)


def _run(title: str, workload: Workload, name: str, root: Path) -> None:
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="weft-bench-")))
        engines = stack.enter_context(serving(workload, folder))
        contender = next(each for each in contenders(engines) if each.name == name)
        ensure_installed(contender, root)
        _, _, port = stack.enter_context(answering(contender, root, folder / name, {}))
        alone, callers = asyncio.run(Callers(workload, port).alone()), Callers(workload, port)
        asyncio.run(callers.run())
    p50, p95 = (1e3 * percentile(callers.firsts, share) for share in (0.5, 0.95))
    share = callers.cached_tokens / max(1, callers.prompt_tokens)
    row = f"{p50:,.0f} | {p95:,.0f} | {share:.3f} | {1e3 * alone:.1f} | {callers.failures}"
    print(f"| {title} | {name} | {row} |", flush=True)


if __name__ == "__main__":
    main()
