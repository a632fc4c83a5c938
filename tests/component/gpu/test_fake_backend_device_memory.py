"""Engines that take memory of fake cards: a double booking is a death for want of memory."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import pytest
from fake_cards_stage import GIB, Stage, needs_the_fake

from runner_svc.policy.engine_failures import last_words
from weft_testing.fake_backend.process import FakeBackendProcess, run_fake_backend
from weft_testing.fake_nvml import FOLDER_VARIABLE

pytestmark = [pytest.mark.slow("starts many processes on fake cards"), needs_the_fake]


@pytest.fixture
def stage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Stage:
    made = Stage(tmp_path, 8 * GIB, 8 * GIB, 16 * GIB)
    monkeypatch.setenv(FOLDER_VARIABLE, str(made.cards.folder))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    return made


@asynccontextmanager
async def _engine(amount: int, *flags: str) -> AsyncIterator[FakeBackendProcess]:
    async with run_fake_backend("--take-device-memory", str(amount), *flags) as engine:
        yield engine


async def test_engine_memory_is_split_across_all_cards_and_freed_at_exit(stage: Stage) -> None:
    async with _engine(6 * GIB):
        assert stage.cards.held_bytes() == [2 * GIB] * 3
    assert stage.cards.held_bytes() == [0] * 3


async def test_engine_uses_only_visible_cards_in_bus_order(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    stage.cards.write("buses", 3, 2, 1)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,2")
    async with _engine(4 * GIB, "--tensor-split", "3,1"):
        assert stage.cards.held_bytes() == [GIB, 0, 3 * GIB]


async def test_engine_without_visible_cards_uses_no_memory(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    async with _engine(4 * GIB):
        assert stage.cards.held_bytes() == [0] * 3


async def test_out_of_memory_engine_dies_with_a_message_the_runner_recognizes(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    async with _engine(5 * GIB):
        with pytest.raises(ChildProcessError, match="CUDA error: out of memory") as died:
            async with _engine(3 * GIB + 1):
                pass
        assert last_words(str(died.value).splitlines()) is not None
        async with _engine(3 * GIB):
            assert stage.cards.held_bytes() == [0, 8 * GIB, 0], "what fits is taken"


async def test_only_as_many_concurrently_started_engines_survive_as_fit(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    async with AsyncExitStack() as running:
        begun = await asyncio.gather(
            *(running.enter_async_context(_engine(3 * GIB)) for _ in range(6)), return_exceptions=True
        )
        assert sum(isinstance(one, FakeBackendProcess) for one in begun) == 2
        assert sum(isinstance(one, ChildProcessError) for one in begun) == 4
        assert stage.cards.held_bytes() == [6 * GIB, 0, 0]
