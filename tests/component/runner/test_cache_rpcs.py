"""Options of requests, flushes and figures of the prefix cache, over a runner's gRPC."""

import time
from itertools import count
from pathlib import Path

import pytest
from kit.engines import chat, fake_model
from runner_harness import TICKET_KEY, RunningRunner, events_of, ready_runner, refusal

from runner_svc.chat.chat_settings import ChatSettings
from runner_svc.instance.instance_settings import ServedModel
from runner_svc.policy.lifecycle import Phase
from weft.api.common.v1 import sampling_pb2, usage_pb2
from weft.api.runner.v1 import generation_service_pb2, serve_options_pb2, ticket_pb2
from weft.api.runner.v1 import runner_service_pb2 as pb
from weft.dispatch.tickets import Action, sign
from weft.kernel.errors.reasons import Reason

WORDS = "one two three four five six seven eight nine ten " * 4
NONE = serve_options_pb2.ServeOptions(cache_mode=3)  # type: ignore[arg-type]  # its number
TAGGED = serve_options_pb2.ServeOptions(cache_tag="draft")
_numbers = count(1)


def _model(chat: ChatSettings | None = None, **switches: object) -> ServedModel:
    engine = {"slots": 4, "context_tokens": 2048}
    return fake_model("m", switches, engine, slots=4, chat=chat or ChatSettings())


def _request(
    runner: RunningRunner, tenant: str, options: serve_options_pb2.ServeOptions | None = None
) -> generation_service_pb2.GenerateRequest:
    number = next(_numbers)
    claims = ticket_pb2.TicketClaims(
        request_id=f"request-{number}",
        ticket_id=f"ticket-{number}",
        tenant=tenant,
        model="m",
        runner="r1",
        runner_incarnation=runner.registry.opened[-1].runner.incarnation,
        attempt=1,
    )
    claims.expire_time.FromSeconds(int(time.time()) + 30)
    raw = claims.SerializeToString()
    payload = chat(WORDS, sampling=sampling_pb2.SamplingParams(max_tokens=2))
    return generation_service_pb2.GenerateRequest(
        ticket=ticket_pb2.Ticket(claims=raw, mac=sign(raw, TICKET_KEY)), chat=payload, options=options
    )


async def _usage(runner: RunningRunner, tenant: str) -> usage_pb2.Usage:
    events = await events_of(runner.generation.Generate(_request(runner, tenant)))
    usage: usage_pb2.Usage = events[-1].finished.receipt.usage
    return usage


async def _cached(runner: RunningRunner, tenant: str, options: serve_options_pb2.ServeOptions | None = None) -> int:
    events = await events_of(runner.generation.Generate(_request(runner, tenant, options)))
    return int(events[-1].finished.receipt.usage.cached_prompt_tokens)


async def _flush(runner: RunningRunner, scope: str, **names: str) -> pb.FlushCacheResponse:
    request = pb.FlushCacheRequest(
        permit=await runner.permit(Action.FLUSH, names.get("model", "")),
        scope=pb.FlushCacheRequest.Scope.Value(f"SCOPE_{scope}"),
    )
    for name, value in names.items():
        setattr(request, name, value)
    return await runner.control.FlushCache(request)


async def test_prefix_is_selected_by_the_ticket_tenant(tmp_path: Path) -> None:
    async with ready_runner(tmp_path, [_model()]) as runner:
        assert await _cached(runner, "a") == 0
        assert await _cached(runner, "a") > 20
        assert await _cached(runner, "b") == 0
        assert await _cached(runner, "a", TAGGED) == 0
        assert await _cached(runner, "a", NONE) == 0
        assert await _cached(runner, "a") > 20
        assert await _cached(runner, "b") > 20
        assert await _cached(runner, "a", TAGGED) > 20


async def test_platform_prompt_counts_as_prompt_and_cached_tokens_per_tenant(tmp_path: Path) -> None:
    said = "house " * 200
    async with ready_runner(tmp_path, [_model()]) as runner:
        plain = (await _usage(runner, "a")).prompt_tokens
    prompted = _model(ChatSettings(platform_prompt=True, platform_context=said))
    async with ready_runner(tmp_path, [prompted]) as runner:
        first, again, other = [await _usage(runner, tenant) for tenant in ("a", "a", "b")]
    assert first.prompt_tokens >= plain + 200
    # The minute, which comes after the operator's text, may have changed in between.
    assert (first.cached_prompt_tokens, other.cached_prompt_tokens) == (0, 0)
    assert again.cached_prompt_tokens >= 200


async def test_tenant_flush_keeps_other_tenants_warm_and_reports_what_was_removed(tmp_path: Path) -> None:
    async with ready_runner(tmp_path, [_model()]) as runner:
        for tenant in ("a", "b"):
            await _cached(runner, tenant)
        flushed = await _flush(runner, "TENANT", tenant="a")
        assert flushed.entry_count == 1
        assert flushed.token_count > 20
        assert await _cached(runner, "b") > 20
        assert await _cached(runner, "a") == 0
        assert (await _flush(runner, "MODEL", model="m")).entry_count >= 2
        assert await _cached(runner, "b") == 0


async def test_description_has_cache_statistics_and_tenant_isolation(tmp_path: Path) -> None:
    async with ready_runner(tmp_path, [_model()]) as runner:
        cached = [await _cached(runner, tenant) for tenant in ("a", "a", "b")]
        described = await runner.described()
    assert described.cache_isolation == pb.CACHE_ISOLATION_SLOTS
    assert (described.cache.hit_count, described.cache.miss_count) == (1, 2)
    assert described.cache.cached_token_count == sum(cached)
    assert described.cache.prompt_token_count > sum(cached)


@pytest.mark.parametrize(
    ("options", "field"),
    [
        (serve_options_pb2.ServeOptions(cache_mode=9), "options.cache_mode"),  # type: ignore[arg-type]  # unknown
        (serve_options_pb2.ServeOptions(cache_tag="a b"), "options.cache_tag"),
        (serve_options_pb2.ServeOptions(priority=9), "options.priority"),  # type: ignore[arg-type]  # unknown
    ],
)
async def test_out_of_range_option_is_rejected_by_name(
    tmp_path: Path, options: serve_options_pb2.ServeOptions, field: str
) -> None:
    async with ready_runner(tmp_path, [_model()]) as runner:
        error = await refusal(events_of(runner.generation.Generate(_request(runner, "a", options))))
    assert error.reason is Reason.INVALID_ARGUMENT
    assert field in error.message


async def test_keep_alive_zero_puts_the_model_to_sleep_after_the_request(tmp_path: Path) -> None:
    async with ready_runner(tmp_path, [_model()]) as runner:
        options = serve_options_pb2.ServeOptions()
        options.keep_alive.seconds = 0
        await _cached(runner, "a", options)
        await runner.until(Phase.HIBERNATING)
