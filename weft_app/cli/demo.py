"""`weft demo`: start, one streamed chat, stop. The exit code is 0 only when all of it worked."""

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
import uvloop

from weft.kernel.errors import WeftError
from weft.kernel.reasons import Reason
from weft.kernel.telemetry import configure_logging
from weft_app.cli.output import say
from weft_app.cli.stages import StageDisplay
from weft_app.compose.environment import with_rates
from weft_app.compose.home import WeftHome
from weft_app.config.loader import load_config

if TYPE_CHECKING:
    from weft_app.compose.up import UpHost

TIMEOUT_SECONDS = 120.0


def demo(
    prompt: Annotated[str, typer.Option(help="The prompt.")] = "Explain in two sentences why the sky is blue.",
    max_tokens: Annotated[int, typer.Option(help="Maximum tokens of the answer.")] = 64,
) -> None:
    """Start a mesh in a temporary home, stream one chat through its HTTP API, stop it.

    Example: weft demo --prompt "Say hello"
    """
    with tempfile.TemporaryDirectory(prefix="weft-demo-") as folder:
        home = WeftHome(Path(folder))
        home.create()
        config = load_config(None, {"port": 0}, partial(with_rates, environment=os.environ))
        configure_logging("host", file=home.log_file("host", config.log.max_file_bytes))
        from weft_app.compose.up import UpHost  # noqa: PLC0415 - see weft_app.cli.serve

        with home.claim():
            uvloop.run(_demo(UpHost(config, home, None), prompt, max_tokens))


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
    """Streams one chat to stdout; returns chunk count and time of the first. Raises when it does not complete."""
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
