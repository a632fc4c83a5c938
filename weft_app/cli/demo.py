"""`weft mesh demo`: start, one streamed chat, stop. The exit code is 0 only when all of it worked."""

import asyncio
import json
import os
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import aiohttp
import typer

from runner_svc.model_store.store import ModelStore
from weft.kernel.errors.error_tree import WeftError
from weft.kernel.errors.reasons import Reason
from weft.kernel.telemetry.structured_logs import configure_logging
from weft_app.cli.options import DEFAULT_HOME
from weft_app.cli.serving import run_service
from weft_app.cli.stages import StageDisplay
from weft_app.cli.terminal import say
from weft_app.compose.configuration import ConfigurationSource
from weft_app.compose.environment import with_rates
from weft_app.compose.home import WeftHome

if TYPE_CHECKING:
    from weft_app.compose.up import UpHost

TIMEOUT_SECONDS = 120.0


def demo(
    prompt: Annotated[str, typer.Option(help="The prompt.")] = "Explain in two sentences why the sky is blue.",
    max_tokens: Annotated[int, typer.Option(help="Maximum tokens of the answer.")] = 64,
) -> None:
    """Start a mesh in a temporary home, stream one chat through its HTTP API, and stop it.

    Example: weft mesh demo --prompt "Say hello"
    """
    with tempfile.TemporaryDirectory(prefix="weft-demo-") as folder:
        home = WeftHome(Path(folder))
        home.create()
        # Keeps a pulled model for the next demo.
        kept = WeftHome(DEFAULT_HOME.expanduser().absolute())
        kept.root.mkdir(mode=0o700, parents=True, exist_ok=True)
        store = ModelStore(kept.models)
        store.create()
        home.models.symlink_to(store.root)
        source = ConfigurationSource(overrides={"port": 0}, below=partial(with_rates, environment=os.environ))
        read = source.read()
        configure_logging("host", file=home.log_file("host", read.config.log.max_file_bytes))
        from weft_app.compose.up import UpHost  # noqa: PLC0415 - see weft_app.cli.serve

        with home.claim():
            run_service(_demo(UpHost(source, read, home), prompt, max_tokens))


async def _demo(host: "UpHost", prompt: str, max_tokens: int) -> None:
    began = time.monotonic()
    with StageDisplay(total=host.stage_count) as display:
        await host.start(display.show)
    try:
        say(f"\n> {prompt}\n")
        async with asyncio.timeout(TIMEOUT_SECONDS):
            pieces, first = await _stream_chat(host.url, host.models[0], prompt, max_tokens)
        say(f"\n\n{pieces} chunks; from start to first token {first - began:.1f} s\n")
    finally:
        await host.stop()
    say("ok: up, chat, down\n")


async def _stream_chat(url: str, model: str, prompt: str, max_tokens: int) -> tuple[int, float]:
    """Streams one chat to stdout. Returns the number of chunks and the time of the first. Raises if incomplete."""
    body = {
        "model": model,
        "messages": [{"role": "user", "content": prompt}],
        "max_tokens": max_tokens,
        "stream": True,
    }
    pieces, first, done = 0, 0.0, False
    async with aiohttp.ClientSession() as session, session.post(f"{url}/v1/chat/completions", json=body) as response:
        response.raise_for_status()
        async for line in response.content:
            data = line.decode().removeprefix("data:").strip()
            if not line.startswith(b"data:"):
                continue
            if data == "[DONE]":
                done = True
                break
            for choice in json.loads(data).get("choices", ()):
                text = choice["delta"].get("content")
                if text:
                    pieces, first = pieces + 1, first or time.monotonic()
                    say(text)
    if not (done and pieces):
        raise WeftError(Reason.INTERNAL, f"the stream ended early, after {pieces} chunks")
    return pieces, first
