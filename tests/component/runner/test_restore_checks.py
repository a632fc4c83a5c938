"""An engine is tested once whether it continues restored prompts; if it does not, none is saved or restored."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from kit.engines import fake_engine, fake_model, started
from kit.presence import present
from runner_harness import events_of, ready_runner

from runner_svc.backend.port import LoadOrder
from runner_svc.cache import restore_checks
from runner_svc.cache.prompt_store import PromptStore
from runner_svc.cache.restore_checks import RestoreCheck
from runner_svc.instance.instance_settings import ServedModel
from runner_svc.runtimes.llama_server.llama_server_backend import LlamaServerBackend
from weft.api.common.v1 import chat_pb2

CONTINUES = RestoreCheck(resumes=True)
PROCESSES_AGAIN = RestoreCheck(resumes=False, reason="the engine processes restored prompts again")
LYING = {"forgets_restored": True}
"""As llama.cpp#26676: the number of restored tokens that the engine reports is the same."""


@asynccontextmanager
async def _started(
    folder: Path, order: LoadOrder | None = None, **switches: Any
) -> AsyncIterator[tuple[LlamaServerBackend, PromptStore]]:
    """An engine after the test of another process of the runner."""
    store = PromptStore(folder, 1024 * 1024)
    await store.open()
    async with started(fake_engine(switches, slots=1), order) as (backend, _):
        await store.check(backend)
        yield backend, store


@pytest.mark.parametrize(("lies", "check"), [(False, CONTINUES), (True, PROCESSES_AGAIN)])
async def test_engine_is_judged_by_the_cached_tokens_after_a_restore(
    tmp_path: Path, lies: bool, check: RestoreCheck
) -> None:
    async with _started(tmp_path, forgets_restored=lies) as (backend, store):
        assert store.checks.of(backend) == check
        assert [slot.is_empty for slot in await backend.slot_snapshots()] == [True]


async def test_engine_is_tested_once_for_its_build_files_and_settings(tmp_path: Path) -> None:
    orders = (LoadOrder(), LoadOrder(), LoadOrder(parameters={"context_tokens": 1024}))
    tested = []
    for order in orders:
        async with _started(tmp_path, order) as (backend, store):
            assert store.checks.of(backend) == CONTINUES
            tested.append((await backend.slot_snapshots())[0].task is not None)
    assert tested == [True, False, True]


async def test_engine_that_refuses_to_save_is_not_asked_again(tmp_path: Path) -> None:
    async with started(fake_engine(slots=1)) as (backend, _):
        store = PromptStore(tmp_path, 1024 * 1024)
        await store.open()
        present(backend._saved).remove()
        await store.check(backend)
        refused = RestoreCheck(resumes=False, reason="the server refused to save slot 0 (status 500)")
        assert store.checks.of(backend) == refused
        later = PromptStore(tmp_path, 1024 * 1024)
        await later.open()
        assert later.checks.of(backend) == refused


async def test_test_that_does_not_end_delays_the_start_by_its_limit_and_is_repeated_by_the_next_runner(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(restore_checks, "CHECK_SECONDS", 0.05)
    async with _started(tmp_path, prefill_held=True) as (backend, store):
        assert store.checks.of(backend) == RestoreCheck(None, "the test took longer than 0.05 s")
        later = PromptStore(tmp_path, 1024 * 1024)
        await later.open()
        assert later.checks.of(backend) is None


async def test_damaged_file_of_results_is_ignored(tmp_path: Path) -> None:
    (tmp_path / "checks").write_text("{")
    async with _started(tmp_path) as (backend, store):
        assert store.checks.of(backend) == CONTINUES


async def test_nothing_is_saved_of_an_engine_that_does_not_continue_prompts(tmp_path: Path) -> None:
    texts = [f"{topic}: tell me more about the {topic}. " * 60 for topic in ("sea", "hills", "sea")]
    contents = [[chat_pb2.ContentPart(text=text)] for text in texts]
    async with ready_runner(tmp_path, [fake_model("m", LYING)], stored_prompts_mb=64) as runner:
        for content in contents:
            await events_of(runner.generate(messages=[chat_pb2.ChatMessage(role=chat_pb2.ROLE_USER, content=content)]))
        cache = (await runner.described()).cache
        await runner.unload()
    assert (cache.continues_restored, cache.not_restored_reason) == (False, PROCESSES_AGAIN.reason)
    assert cache.HasField("continues_restored")
    assert (cache.kept_prompt_count, cache.kept_limit_bytes, cache.restored_prompt_count) == (0, 0, 0)
    assert list((tmp_path / "r1.prompts").glob("*.prompt")) == []


async def test_runner_that_stores_no_prompts_tests_no_engine(tmp_path: Path) -> None:
    engine = fake_engine(slots=1)
    async with ready_runner(tmp_path, [ServedModel(name="m", make_backend=lambda: engine)]) as runner:
        assert not (await runner.described()).cache.HasField("continues_restored")
        assert [slot.task for slot in await engine.slot_snapshots()] == [None]
