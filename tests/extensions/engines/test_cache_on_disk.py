"""Many tenants on an engine that ends before each request: what they find comes from files, and only from their own."""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from hosted_stage import scripted
from kit.engine_settings import engine_settings
from kit.engines import call_of, fake_engine
from kit.one_model import OneModel
from kit.tiny_gguf import write_gguf

from runner_svc.backend.port import Backend
from runner_svc.cache.manager import CacheManager
from runner_svc.cache.prompt_store import PromptStore
from weft_extensions.engines.llama_cpp_python.llama_cpp_python_backend import LlamaCppPythonBackend
from weft_extensions.engines.llama_cpp_python.runtime import LlamaCppPythonModel
from weft_testing.conformance.prefix_cache import MODEL, SEA, PrefixCacheConformance, Tenants

BUDGET = 64 * 1024 * 1024
LONG = SEA * 8


def _library(folder: Path, **switches: Any) -> LlamaCppPythonBackend:
    model = folder / "tiny.gguf"
    if not model.exists():
        write_gguf(model)
    settings = scripted("SCRIPTED_LLAMA", {"answer": "Yes.", **switches}, context_tokens=4096, name=MODEL)
    return LlamaCppPythonBackend(*engine_settings(LlamaCppPythonModel, path=model, **settings))


class _OnDisk(Tenants):
    """Requests before each of which the engine is unloaded and loaded, unless others run."""

    def __init__(self, backend: Backend, desk: CacheManager, model: OneModel) -> None:
        super().__init__(backend, desk, call_of)
        self._model, self._lock, self._running = model, asyncio.Lock(), 0

    async def cached(self, *args: Any, **options: Any) -> int:
        async with self._lock:
            if not self._running:
                await self.reload()
            self._running += 1
        try:
            return await super().cached(*args, **options)
        finally:
            self._running -= 1

    async def reload(self) -> None:
        """Unloads the model and loads it again."""
        await self.desk.put_away(self._model)
        await self.backend.stop()
        await self.desk.settle()
        await self.backend.start()


@asynccontextmanager
async def _on_disk(backend: Backend, folder: Path) -> AsyncGenerator[_OnDisk]:
    model = OneModel(backend)
    desk = CacheManager([model], store=PromptStore(folder / "prompts", BUDGET))
    await desk.open()
    await backend.start()
    try:
        yield _OnDisk(backend, desk, model)
        await desk.put_away(model)
        await desk.close()
    finally:
        await backend.stop()
        await desk.settle()


class _Suite(PrefixCacheConformance):
    counts_flushed = False
    # The engine would still start when the flush comes.
    test_a_request_that_runs_during_a_flush_leaves_nothing = None  # type: ignore[assignment]

    @pytest.fixture(autouse=True)
    def _folder(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.folder = tmp_path
        # The prompts of the suite are shorter than what is worth a file.
        monkeypatch.setattr("runner_svc.cache.model_cache.MARK_BYTES", 64)

    @asynccontextmanager
    async def tenants(self) -> AsyncGenerator[Tenants]:
        async with _on_disk(self.make_backend(), self.folder) as ask:
            yield ask


@pytest.mark.nightly("starts an engine before each request of the suite")
class TestFakeServerOnDisk(_Suite):
    slots = 3

    def make_backend(self) -> Backend:
        return fake_engine(name=MODEL, slots=3, context_tokens=4096, extra_arguments=("--token-delay-seconds", "0.01"))


@pytest.mark.nightly("starts an engine before each request of the suite")
class TestLlamaCppPythonOnDisk(_Suite):
    slots = 1

    def make_backend(self) -> Backend:
        return _library(self.folder, seconds_per_token=0.01)


@pytest.mark.slow("starts engine processes")
async def test_llama_cpp_python_restores_a_prompt_for_its_own_tenant_and_tag_only(tmp_path: Path) -> None:
    async with _on_disk(_library(tmp_path), tmp_path) as ask:
        await ask.cached("a", LONG, tag="x")
        assert [await ask.cached("b", LONG, tag="x"), await ask.cached("a", LONG, tag="y")] == [0, 0]
        assert await ask.cached("a", LONG, tag="x") == len(LONG), "all but the last token, which is evaluated again"
        assert await ask.cached("a", f"{LONG}And then?", tag="x") > len(LONG)
        await ask.flush("tenant", tenant="a")
        assert await ask.cached("a", LONG, tag="x") == 0


@pytest.mark.slow("starts engine processes")
async def test_another_version_of_the_library_restores_nothing(tmp_path: Path) -> None:
    for version, is_found in (("0.3.36", False), ("0.3.36", True), ("0.3.37", False)):
        async with _on_disk(_library(tmp_path, version=version), tmp_path) as ask:
            assert (await ask.cached("a", LONG) > 0) == is_found


@pytest.mark.slow("starts engine processes")
async def test_llama_cpp_python_answers_if_it_cannot_save(tmp_path: Path) -> None:
    async with _on_disk(_library(tmp_path, save_fails=True), tmp_path) as ask:
        assert [await ask.cached("a", LONG) for _ in range(2)] == [0, 0]
