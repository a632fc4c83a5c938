"""Many tenants on the fake server, which keeps prefixes and erases slots as llama.cpp's does."""

from kit.engines import fake_engine
from kit.one_model import OneModelCache

from runner_svc.backend.port import CacheIsolation
from runner_svc.runtimes.llama_server.llama_server_backend import LlamaServerBackend
from weft.kernel.requests.request_values import CacheMode
from weft_testing.conformance.prefix_cache import CITY, HILLS, MODEL, SEA


def _backend(*extra_arguments: str, slots: int = 3) -> LlamaServerBackend:
    return fake_engine(name=MODEL, slots=slots, context_tokens=4096, extra_arguments=extra_arguments)


class TestFakeServer(OneModelCache):
    slots = 3

    def make_backend(self) -> LlamaServerBackend:
        return _backend("--token-delay-seconds", "0.01")

    async def test_single_tenant_keeps_several_prefixes_in_the_engine(self) -> None:
        async with self.tenants() as ask:
            for prompt in (SEA, HILLS, CITY):
                await ask.cached("a", prompt)
            found = [await ask.cached("a", prompt) for prompt in (SEA, HILLS, CITY)]
            assert min(found) > 20

    async def test_tenant_among_others_keeps_several_prefixes(self) -> None:
        async with self.tenants() as ask:
            await ask.cached("b", CITY)
            for prompt in (SEA, HILLS):
                await ask.cached("a", prompt)
            found = [await ask.cached("a", prompt) for prompt in (SEA, HILLS)]
            assert min(found) > 20
            assert await ask.cached("b", CITY) > 20

    async def test_prefix_of_an_uncached_request_is_erased_from_the_engine(self) -> None:
        async with self.tenants() as ask:
            await ask.cached("a", SEA)
            await ask.flush("all")
            await ask.cached("a", SEA, mode=CacheMode.NONE)
            await ask.cached("a", HILLS)
            assert sum(not sight.is_empty for sight in await ask.backend.slot_snapshots()) <= 2

    async def test_restarted_engine_has_an_empty_cache_index(self) -> None:
        async with self.tenants() as ask:
            await ask.cached("a", SEA)
            await ask.cached("b", SEA)
            await ask.backend.stop()
            assert (await ask.flush("all")).entry_count == 0
            await ask.backend.start()
            assert await ask.cached("b", SEA) == 0
            assert await ask.cached("b", SEA) > 20


async def test_server_sharing_prompts_between_slots_reports_no_isolation() -> None:
    assert _backend().cache_isolation is CacheIsolation.SLOTS
    for flag in (("--cache-ram", "100"), ("-cram", "100"), ("--cache-ram=100",)):
        assert _backend(*flag).cache_isolation is CacheIsolation.NONE
