"""Adapters of the demo model as models of their own, on a real llama.cpp server."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest
from kit.tiny_gguf import write_adapter
from runner_harness import RunningRunner, running_runner

from runner_svc.policy.lifecycle import Phase
from weft.api.common.v1 import chat_pb2, receipt_pb2
from weft_app.compose.demo import demo_model_path
from weft_app.compose.served_models import served_model
from weft_app.config.loader import parse_config

pytestmark = [pytest.mark.slow("a real engine"), pytest.mark.real]

QUESTION = "What is the capital of France? Answer with one word."
LOAD_SECONDS = 60.0


@asynccontextmanager
async def _running(folder: Path, *, slots: int, **adapters: dict[str, Any]) -> AsyncIterator[RunningRunner]:
    named = [
        {
            "name": name,
            "path": str(write_adapter(folder / f"{name}.gguf", strength=given.pop("strength", 0.5))),
            **given,
        }
        for name, given in adapters.items()
    ]
    model = {
        "name": "m",
        "path": str(demo_model_path()),
        "slots": slots,
        "threads": 1,
        "context_tokens": 512,
        "adapters": named,
    }
    config = parse_config({"runners": [{"name": "r1", "runtime": "llama_server", "models": [model]}]})
    assert config.runners is not None
    section = config.runners[0]
    async with running_runner(folder, [served_model(section, section.models[0], 5.0)]) as runner:
        async with asyncio.timeout(LOAD_SECONDS):
            await runner.until(Phase.READY)
        yield runner


async def _ask(runner: RunningRunner, model: str) -> tuple[str, receipt_pb2.Receipt]:
    """Returns the answer of a model to the question, and the receipt."""
    text, receipt = "", receipt_pb2.Receipt()
    message = chat_pb2.ChatMessage(role=chat_pb2.ROLE_USER, content=[chat_pb2.ContentPart(text=QUESTION)])
    async for response in runner.generate(model=model, max_tokens=8, messages=[message]):
        for event in response.events:
            text += event.delta.text
            if event.HasField("finished"):
                receipt = event.finished.receipt
    return text, receipt


async def test_adapter_answers_by_its_own_name_and_leaves_the_base_model_unchanged(tmp_path: Path) -> None:
    async with _running(tmp_path, slots=2, pirate={}) as runner:
        plain, plain_receipt = await _ask(runner, "m")
        adapted, receipt = await _ask(runner, "pirate")
        again, _ = await _ask(runner, "m")
        assert "Paris" in plain
        assert "Paris" in again
        assert "Paris" not in adapted
        assert (receipt.model, plain_receipt.model) == ("pirate", "m")
        assert receipt.adapter_digest.startswith("sha256:")
        assert plain_receipt.adapter_digest == ""
        assert receipt.model_digest == plain_receipt.model_digest


async def test_adapter_scale_sets_its_strength(tmp_path: Path) -> None:
    async with _running(tmp_path, slots=2, little={"scale": 0.001}, much={"scale": 1.0}) as runner:
        assert "Paris" in (await _ask(runner, "little"))[0]
        assert "Paris" not in (await _ask(runner, "much"))[0]


@pytest.mark.parametrize("slots", [1, 3])
async def test_prefix_cache_is_separate_per_adapter(tmp_path: Path, slots: int) -> None:
    async with _running(tmp_path, slots=slots, one={"strength": 0.0}, other={"strength": 0.0}) as runner:

        async def cached(model: str) -> int:
            return (await _ask(runner, model))[1].usage.cached_prompt_tokens

        for model in ("m", "one", "other"):
            assert await cached(model) == 0, model
            assert await cached(model) > 0, model
        if slots == 1:
            assert await cached("m") == 0, "the one slot has the prompt as another adapter computed it"
        else:
            assert await cached("m") > 0, "it has its own slot"


async def test_model_and_its_adapters_are_loaded_and_unloaded_together(tmp_path: Path) -> None:
    async with _running(tmp_path, slots=1, pirate={}) as runner:
        states = {state.model: state for state in runner.registry.capability.instances}
        assert {name: state.base_model for name, state in states.items()} == {"m": "", "pirate": "m"}
        described = runner.service.describe().instances
        assert {each.model for each in described} == {"m", "pirate"}
        (process_id,) = {each.process_id for each in described}
        await runner.unload("pirate")
        assert not psutil.pid_exists(process_id)
        await runner.until(Phase.HIBERNATING)
        await runner.until(Phase.HIBERNATING, "pirate")
        async with asyncio.timeout(LOAD_SECONDS):
            await runner.wake("pirate")
        await runner.until(Phase.READY)
        assert (await _ask(runner, "m"))[0]
