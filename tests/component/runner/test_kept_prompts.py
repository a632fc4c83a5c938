"""Prompts that no slot holds any more come back from the memory of the host, and to their own tenant only."""

from typing import Any

import pytest
from kit.engines import call_of, fake_engine
from kit.one_model import OneModel
from kit.presence import present

from runner_svc.cache.manager import CacheManager
from runner_svc.runtimes.llama_server.llama_server_backend import LlamaServerBackend
from weft_testing.conformance.prefix_cache import MODEL, Tenants

TOPICS = ("sea", "hills", "city", "river", "forest", "desert", "island", "lake")


def _backend(**settings: Any) -> LlamaServerBackend:
    return fake_engine(name=MODEL, slots=2, context_tokens=4096, **settings)


def _text(topic: str) -> str:
    return f"{topic}: tell me more about the {topic}. " * 60


class _Engine:
    def __init__(self, backend: LlamaServerBackend) -> None:
        self.backend = backend
        self._desk = CacheManager([OneModel(backend)])
        self.tenants = Tenants(backend, self._desk, call_of)

    async def __aenter__(self) -> Tenants:
        await self.backend.start()
        return self.tenants

    async def __aexit__(self, *_: object) -> None:
        await self._desk.close()
        await self.backend.stop()


async def test_eight_alternating_conversations_hit_the_cache_with_two_slots() -> None:
    async with _Engine(_backend()) as ask:
        assert [await ask.cached("a", _text(topic)) for topic in TOPICS] == [0] * 8
        found = [await ask.cached("a", _text(topic) + "And then?") for topic in TOPICS]
        assert min(found) > 200


async def test_prompts_are_recomputed_without_saved_prompt_memory() -> None:
    async with _Engine(_backend(kept_prompts_mb=0)) as ask:
        for topic in TOPICS:
            await ask.cached("a", _text(topic))
        assert [await ask.cached("a", _text(topic)) for topic in TOPICS] == [0] * 8


@pytest.mark.parametrize("scope", [("all", {}), ("tenant", {"tenant": "a"}), ("model", {"model": MODEL})])
async def test_flush_deletes_saved_prompts(scope: tuple[str, dict[str, str]]) -> None:
    async with _Engine(_backend()) as ask:
        for topic in TOPICS:
            await ask.cached("a", _text(topic))
        await ask.flush(scope[0], **scope[1])
        assert [await ask.cached("a", _text(topic)) for topic in TOPICS] == [0] * 8


async def test_saved_prompts_are_private_count_as_memory_and_are_deleted_with_the_engine() -> None:
    backend = _backend()
    async with _Engine(backend) as ask:
        for topic in TOPICS:
            await ask.cached("a", _text(topic))
        saved = present(backend._saved)
        folder = present(saved.folder)
        files = [file.stat().st_size for file in folder.iterdir()]
        assert len(files) == 6
        assert saved.byte_count == sum(files) > 0
        assert folder.stat().st_mode & 0o777 == 0o700
    assert not folder.exists()
