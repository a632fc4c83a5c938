"""Many tenants on one real llama.cpp server: no tenant finds the prefix of another."""

import pytest
from kit.engine_settings import engine_settings
from kit.one_model import OneModel

from runner_svc.backend.port import Backend, CacheUse, CallInfo
from runner_svc.cache.manager import CacheManager
from runner_svc.runtimes.llama_server.backend import LlamaServerBackend
from runner_svc.runtimes.llama_server.runtime import LlamaServerModel, llama_command
from weft_app.compose.demo import demo_model_path
from weft_testing.conformance.prefix_cache import MODEL, PROMPTS, SEA, PrefixCacheConformance

pytestmark = pytest.mark.real


@pytest.mark.slow("computes prompts")
async def test_server_resumes_conversations_that_lost_their_slots() -> None:
    suite = TestLlamaServerFromTheWheel()
    async with suite.tenants() as ask:
        prompts = [prompt * 5 for prompt in PROMPTS]
        for prompt in prompts:
            await ask.cached("a", prompt)
        await ask.cached("b", prompts[0])
        found = [await ask.cached("a", f"{prompt} And then?") for prompt in prompts]
        assert min(found) > 200
        assert await ask.cached("c", prompts[0]) == 0


@pytest.mark.nightly("repeats test_cache_fake_server on a real engine")
class TestLlamaServerFromTheWheel(PrefixCacheConformance):
    slots = 2

    def make_backend(self) -> LlamaServerBackend:
        return LlamaServerBackend(
            *engine_settings(
                LlamaServerModel,
                command=llama_command(()),
                path=demo_model_path(),
                name=MODEL,
                slots=2,
                context_tokens=512,
            )
        )

    def make_desk(self, backend: Backend) -> CacheManager:
        return CacheManager.over([OneModel(backend, model_path=demo_model_path())])

    def make_call(self, use: CacheUse | None) -> CallInfo:
        return CallInfo(request_id="r", traceparent="", cache=use or CacheUse())

    async def test_flush_reports_the_reusable_memory(self) -> None:
        """SmolLM2 keeps 2 x 30 layers x 3 heads x 64 numbers of two bytes per token: 23,040 bytes."""
        async with self.tenants() as ask:
            await ask.cached("a", SEA)
            flushed = await ask.flush("all")
            assert flushed.token_count > 20
            assert flushed.reusable_bytes == flushed.token_count * 23_040
