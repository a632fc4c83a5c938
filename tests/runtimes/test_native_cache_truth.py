"""Many tenants on the heavy runtimes: nobody finds another one's prefix."""

import os

import pytest
from kit.engine_settings import engine_settings
from kit.one_model import OneModelCache
from native_builds import LLAMA_CPP, ROOT, built_llama_cpp_python, built_llama_server

from runner_svc.backend.port import Backend, CacheUse, CallInfo
from runner_svc.runtimes.llama_server.llama_server_backend import LlamaServerBackend
from runner_svc.runtimes.llama_server.runtime import LlamaServerModel
from weft_app.compose.demo import demo_model_path
from weft_extensions.engines.llama_cpp_python.llama_cpp_python_backend import LlamaCppPythonBackend
from weft_extensions.engines.llama_cpp_python.runtime import LlamaCppPythonModel
from weft_testing.conformance.prefix_cache import (
    CITY,
    HILLS,
    MIN_HIT_TOKENS,
    MODEL,
    SEA,
    completion,
)

SERVER_PROGRAM = "weft_extensions.engines.llama_cpp_python.server"

pytestmark = [pytest.mark.runtimes, pytest.mark.timeout(3700)]


class TestNativeLlamaServer(OneModelCache):
    slots = 4

    def make_backend(self, *extra_arguments: str) -> LlamaServerBackend:
        return LlamaServerBackend(
            *engine_settings(
                LlamaServerModel,
                command=(str(built_llama_server()),),
                path=demo_model_path(),
                name=MODEL,
                slots=self.slots,
                context_tokens=512,
                extra_arguments=extra_arguments,
            )
        )

    async def test_host_memory_cache_would_share_prefixes_across_tenants(self) -> None:
        """Why it is switched off, and why whoever switches it on is told that tenants are not kept apart."""
        backend = self.make_backend("--cache-ram", "512")
        await backend.start()
        try:
            found = [await _cached(backend, slot, text) for slot, text in ((1, CITY), (0, SEA), (0, HILLS), (1, SEA))]
            assert found[-1] > MIN_HIT_TOKENS
            assert self.make_backend().cache_isolation.name == "SLOTS"
            assert backend.cache_isolation.name == "NONE"
        finally:
            await backend.stop()


class TestLlamaCppPythonKeepsTenantsApart(OneModelCache):
    slots = 1

    def make_backend(self) -> LlamaCppPythonBackend:
        return LlamaCppPythonBackend(
            *engine_settings(
                LlamaCppPythonModel,
                command=(str(built_llama_cpp_python()), "-m", SERVER_PROGRAM),
                environment={**os.environ, "PYTHONPATH": str(ROOT), "LLAMA_CPP_LIB_PATH": str(LLAMA_CPP / "bin")},
                path=demo_model_path(),
                context_tokens=512,
            )
        )


async def _cached(backend: Backend, slot: int, prompt: str) -> int:
    call = CallInfo(request_id="r", traceparent="", cache=CacheUse(slot=slot))
    events = [event async for frame in backend.generate(completion(prompt), call) for event in frame]
    return events[-1].finished.receipt.usage.cached_prompt_tokens
