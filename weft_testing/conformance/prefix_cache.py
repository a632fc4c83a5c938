"""The conformance suite of prefix caches shared by several tenants, as tests to inherit.

    class TestMyEngine(PrefixCacheConformance):
        slots = 2

        def make_backend(self) -> Backend: ...
        def make_desk(self, backend: Backend) -> CacheManager: ...
        def make_call(self, use: CacheUse) -> CallInfo: ...

The engine is a real one, or one that forgets like real ones. Only the reported number of cached tokens is compared, not
text: a warm engine answers differently from a cold one.
"""
# ruff: noqa: D102 (test names are sentences)

import asyncio
import random
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from typing import Any

from weft.api.common.v1 import completion_pb2, embedding_pb2, receipt_pb2, sampling_pb2
from weft.api.runner.v1 import runner_service_pb2 as pb
from weft.dispatch.frames import GenerationPayload
from weft.kernel.requests.request_values import CacheMode, Handling
from weft_testing.conformance.backend_steps import beside, chat

MODEL = "m"
MIN_HIT_TOKENS = 20
"""A cached prompt has more cached tokens than this; the beginning of a chat template has fewer."""
RANDOM_STEPS = 60

# Longer than a page of 256 tokens even if each character is one token.
SEA = "The sea is wide and deep and blue, and ships sail over it by day and by night. " * 4
HILLS = "Hills are high and green in spring, and sheep graze on them until the snow comes. " * 4
CITY = "Cities are loud and bright at night, and trains run under them from end to end. " * 4
PROMPTS = (SEA, HILLS, CITY)


def completion(prompt: str, tokens: int = 1) -> completion_pb2.CompletionPayload:
    """A short completion."""
    return completion_pb2.CompletionPayload(
        prompts=[completion_pb2.PromptInput(text=prompt)], sampling=sampling_pb2.SamplingParams(max_tokens=tokens)
    )


class Tenants:
    """Requests of several tenants to one engine."""

    def __init__(self, backend: Any, desk: Any, make_call: Any) -> None:
        self.backend = backend
        self.desk = desk
        self._make_call = make_call

    async def cached(
        self, tenant: str, prompt: str | GenerationPayload, *, tag: str = "", mode: CacheMode = CacheMode.AUTO
    ) -> int:
        """Returns the number of cached tokens of a prompt in a tenant's request."""
        payload = completion(prompt) if isinstance(prompt, str) else prompt
        handling = Handling(cache_mode=mode, cache_tag=tag)
        async with await self.desk.of_request(MODEL, tenant, handling).generating(payload) as turn:
            receipt: receipt_pb2.Receipt | None = None
            async for frame in self.backend.generate(payload, self._make_call(turn.use)):
                turn.note_work()
                if frame[-1].HasField("finished"):
                    receipt = frame[-1].finished.receipt
        assert receipt is not None
        return receipt.usage.cached_prompt_tokens

    async def embed(self, tenant: str, text: str) -> None:
        """Embeds a text for a tenant."""
        inputs = [completion_pb2.PromptInput(text=text)]
        async with await self.desk.of_request(MODEL, tenant, Handling()).embedding() as turn:
            await self.backend.embed(embedding_pb2.EmbeddingPayload(inputs=inputs), self._make_call(turn.use))

    async def cached_without_isolation(self, prompt: str) -> int:
        """Like `cached`, without information about tenants."""
        async for frame in self.backend.generate(completion(prompt), self._make_call(None)):
            if frame[-1].HasField("finished"):
                return int(frame[-1].finished.receipt.usage.cached_prompt_tokens)
        raise AssertionError("the answer has no end")

    async def flush(self, scope: str, **names: str) -> pb.FlushCacheResponse:
        """Flushes a scope: all, model, tenant or tag."""
        request = pb.FlushCacheRequest(scope=pb.FlushCacheRequest.Scope.Value(f"SCOPE_{scope.upper()}"))
        for name, value in names.items():
            setattr(request, name, value)
        response: pb.FlushCacheResponse = await self.desk.flush(request)
        return response


class PrefixCacheConformance:
    """Inherit, override the three `make_` methods, and let pytest collect the subclass."""

    slots = 2
    """Number of prefixes that the engine keeps."""
    embeds = True
    """Whether the engine supports embeddings."""
    counts_flushed = True
    """Whether a tenant's flush reports what it removed, which is impossible if salts isolate tenants."""

    def make_backend(self) -> Any:
        """Returns a backend, not started."""
        raise NotImplementedError

    def make_desk(self, backend: Any) -> Any:
        """Returns a CacheManager over a model named MODEL on this backend."""
        raise NotImplementedError

    def make_call(self, use: Any) -> Any:
        """Returns a CallInfo with this cache use; None: without one."""
        raise NotImplementedError

    @asynccontextmanager
    async def tenants(self) -> AsyncGenerator[Tenants]:
        """Yields a started engine and stops it afterwards."""
        backend = self.make_backend()
        desk = self.make_desk(backend)
        await backend.start()
        try:
            yield Tenants(backend, desk, self.make_call)
            await desk.close()
        finally:
            await backend.stop()

    async def test_a_tenant_finds_its_own_prefix_again(self) -> None:
        async with self.tenants() as ask:
            assert await ask.cached("a", SEA) == 0
            assert await ask.cached("a", SEA) > MIN_HIT_TOKENS

    async def test_without_isolation_a_probe_does_see_the_prefix_of_another_tenant(self) -> None:
        """Negative control of every test that expects 0."""
        async with self.tenants() as ask:
            await ask.cached_without_isolation(SEA)
            assert await ask.cached_without_isolation(SEA) > MIN_HIT_TOKENS

    async def test_another_tenant_finds_nothing_in_either_direction(self) -> None:
        async with self.tenants() as ask:
            await ask.cached("a", SEA)
            assert await ask.cached("b", SEA) == 0
            await ask.cached("b", HILLS)
            assert await ask.cached("a", HILLS) == 0
            assert await ask.cached("b", CITY) == 0

    async def test_tenants_find_their_own_prefixes_while_there_are_slots_for_all(self) -> None:
        if self.slots < 2:
            return
        async with self.tenants() as ask:
            await ask.cached("a", SEA)
            assert await ask.cached("b", SEA) == 0
            assert await ask.cached("a", SEA) > MIN_HIT_TOKENS
            assert await ask.cached("b", SEA) > MIN_HIT_TOKENS

    async def test_more_tenants_than_slots_stay_isolated(self) -> None:
        async with self.tenants() as ask:
            names = [f"tenant-{number}" for number in range(self.slots + 3)]
            assert [await ask.cached(name, SEA) for name in names] == [0] * len(names)
            assert await ask.cached(names[-1], SEA) > MIN_HIT_TOKENS

    async def test_concurrent_tenants_stay_isolated(self) -> None:
        async with self.tenants() as ask:
            await ask.cached("a", SEA)
            others = [ask.cached(f"other-{number}", SEA) for number in range(self.slots)]
            found = await asyncio.gather(*others, *(ask.cached("a", SEA) for _ in range(self.slots)))
            assert found[: self.slots] == [0] * self.slots, found

    async def test_another_tag_of_the_same_tenant_finds_nothing(self) -> None:
        async with self.tenants() as ask:
            await ask.cached("a", SEA, tag="one")
            assert await ask.cached("a", SEA, tag="two") == 0
            assert await ask.cached("a", SEA) == 0

    async def test_a_request_without_the_cache_finds_nothing_and_leaves_nothing(self) -> None:
        async with self.tenants() as ask:
            await ask.cached("a", SEA)
            assert await ask.cached("a", SEA, mode=CacheMode.NONE) == 0
            assert await ask.cached("a", HILLS, mode=CacheMode.NONE) == 0
            assert await ask.cached("a", HILLS) == 0
            assert await ask.cached("b", HILLS) == 0

    async def test_chats_are_isolated_too(self) -> None:
        async with self.tenants() as ask:
            await ask.cached("a", chat(text=SEA, max_tokens=1))
            assert await ask.cached("b", chat(text=SEA, max_tokens=1)) == 0
            assert await ask.cached("b", chat(text=SEA, max_tokens=1)) > MIN_HIT_TOKENS

    async def test_several_choices_leave_nothing_for_another_tenant(self) -> None:
        async with self.tenants() as ask:
            for number in range(self.slots):
                await ask.cached(f"early-{number}", HILLS)
            await ask.cached("a", chat(text=SEA, max_tokens=1, choice_count=max(2, self.slots)))
            for number in range(self.slots):
                assert await ask.cached(f"early-{number}", chat(text=SEA, max_tokens=1)) == 0

    async def test_an_embedded_text_is_no_prefix_for_another_tenant(self) -> None:
        if not self.embeds:
            return
        async with self.tenants() as ask:
            for number in range(self.slots):
                await ask.cached(f"early-{number}", HILLS)
            await ask.embed("a", SEA)
            for number in range(self.slots):
                assert await ask.cached(f"early-{number}", SEA) == 0

    async def test_a_request_that_is_aborted_immediately_reveals_nothing(self) -> None:
        async with self.tenants() as ask:
            for number in range(self.slots):
                await ask.cached(f"early-{number}", SEA)
            for _ in range(self.slots):
                # An engine may process it nevertheless, so it asks for something else.
                async with beside(ask.cached("b", HILLS)):
                    await asyncio.sleep(0)
            assert await ask.cached("b", SEA) == 0

    async def test_a_flush_makes_one_tenant_cold_and_leaves_the_others_warm(self) -> None:
        async with self.tenants() as ask:
            await ask.cached("b", SEA)
            if self.slots > 1:
                await ask.cached("a", SEA)
            flushed = await ask.flush("tenant", tenant="b")
            if self.counts_flushed:
                assert flushed.entry_count >= 1
                assert flushed.token_count > MIN_HIT_TOKENS
            if self.slots > 1:
                assert await ask.cached("a", SEA) > MIN_HIT_TOKENS
            assert await ask.cached("b", SEA) == 0

    async def test_a_flush_of_a_tag_leaves_the_other_tags_warm(self) -> None:
        async with self.tenants() as ask:
            await ask.cached("a", SEA, tag="one")
            if self.slots > 1:
                await ask.cached("a", SEA, tag="two")
            await ask.flush("tag", tag="one", tenant="a")
            if self.slots > 1:
                assert await ask.cached("a", SEA, tag="two") > MIN_HIT_TOKENS
            assert await ask.cached("a", SEA, tag="one") == 0

    async def test_a_flush_of_the_model_or_of_everything_makes_all_tenants_cold(self) -> None:
        async with self.tenants() as ask:
            for scope, names in (("model", {"model": MODEL}), ("all", {})):
                await ask.cached("a", SEA)
                assert await ask.cached("a", SEA) > MIN_HIT_TOKENS
                await ask.flush(scope, **names)
                assert await ask.cached("a", SEA) == 0

    async def test_a_flush_of_what_was_never_cached_removes_nothing(self) -> None:
        async with self.tenants() as ask:
            assert (await ask.flush("all")).entry_count == 0
            await ask.cached("a", SEA)
            flushed = await ask.flush("tenant", tenant="nobody")
            assert (flushed.entry_count, flushed.token_count) == (0, 0)
            assert await ask.cached("a", SEA) > MIN_HIT_TOKENS

    async def test_a_request_that_runs_during_a_flush_leaves_nothing(self) -> None:
        async with self.tenants() as ask:
            async with beside(ask.cached("a", completion(SEA, tokens=40))) as running:
                await asyncio.sleep(0.1)
                await ask.flush("tenant", tenant="a")
                await running
            assert await ask.cached("a", SEA) == 0

    async def test_random_requests_never_reveal_the_prompts_of_another_tenant(self) -> None:
        """Runs random steps of several tenants, checked against what each can have cached since the last flush."""
        dice = random.Random(20_261_120)  # noqa: S311 - a test
        known: set[tuple[str, str, str]] = set()
        hits = 0
        async with self.tenants() as ask:
            for _ in range(RANDOM_STEPS):
                tenant, tag, prompt = dice.choice("abc"), dice.choice(("", "t")), dice.choice(PROMPTS)
                match dice.randrange(8):
                    case 0:
                        await ask.flush("tenant", tenant=tenant)
                        known = {entry for entry in known if entry[0] != tenant}
                    case 1:
                        assert await ask.cached(tenant, prompt, tag=tag, mode=CacheMode.NONE) == 0
                    case 2 if self.embeds:
                        await ask.embed(tenant, prompt)
                        known.add((tenant, "", prompt))
                    case _:
                        for _ in range(dice.randrange(1, 3)):
                            found = await ask.cached(tenant, prompt, tag=tag)
                            hits += found > MIN_HIT_TOKENS
                            if (tenant, tag, prompt) not in known:
                                assert found == 0, (tenant, tag, prompt[:10])
                            known.add((tenant, tag, prompt))
        assert hits > RANDOM_STEPS // 8
