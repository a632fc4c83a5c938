"""WatchPrefixes: routers learn by their own digests what an engine has cached."""

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from itertools import count
from pathlib import Path

import grpc
import psutil
import pytest
from kit.block_publisher import BlockPublisher, publisher, removed, stored
from kit.engine_settings import engine_settings
from kit.engines import GRACES, chat, fake_model
from runner_harness import TICKET_KEY, RunningRunner, events_of, ready_runner, refusal

from runner_svc.instance.instance_settings import ServedModel
from runner_svc.runtimes.vllm.runtime import VllmModel
from runner_svc.runtimes.vllm.vllm_backend import VllmBackend
from weft.api.common.v1 import chat_pb2, sampling_pb2
from weft.api.runner.v1 import generation_service_pb2, serve_options_pb2, ticket_pb2
from weft.api.runner.v1 import runner_service_pb2 as pb
from weft.dispatch.payload_description import cache_scope, describe
from weft.dispatch.tickets import Action, sign
from weft.kernel.errors.reasons import Reason
from weft_testing.fake_backend.process import fake_backend_command

pytestmark = pytest.mark.slow("runs whole services")

_numbers = count(1)
NO_CACHE = serve_options_pb2.ServeOptions(cache_mode=3)  # type: ignore[arg-type]  # its number


def _payload(text: str) -> chat_pb2.ChatPayload:
    return chat(text, sampling=sampling_pb2.SamplingParams(max_tokens=2))


def _digests(text: str, tenant: str, tag: str = "") -> list[int]:
    """The digests with which a dispatcher asks a router for a place."""
    return list(describe(_payload(text), salt=cache_scope(tenant, tag)).prefix_digests)


async def _served(
    runner: RunningRunner, text: str, tenant: str, options: serve_options_pb2.ServeOptions | None = None
) -> str:
    request_id = f"request-{next(_numbers)}"
    claims = ticket_pb2.TicketClaims(
        request_id=request_id,
        ticket_id=f"ticket-of-{request_id}",
        tenant=tenant,
        model="m",
        runner="r1",
        runner_incarnation=runner.registry.opened[-1].runner.incarnation,
        attempt=1,
    )
    claims.expire_time.FromSeconds(int(time.time()) + 30)
    raw = claims.SerializeToString()
    ticket = ticket_pb2.Ticket(claims=raw, mac=sign(raw, TICKET_KEY))
    request = generation_service_pb2.GenerateRequest(ticket=ticket, chat=_payload(text), options=options)
    assert (await events_of(runner.generation.Generate(request)))[-1].HasField("finished")
    return request_id


@asynccontextmanager
async def _reporting_runner(folder: Path) -> AsyncIterator[tuple[RunningRunner, BlockPublisher]]:
    backend = VllmBackend(
        *engine_settings(
            VllmModel,
            command=tuple(fake_backend_command()),
            name="m",
            model="org/model",
            kv_events=True,
            context_tokens=8_192,
            load_stall_seconds=10.0,
            graces=GRACES,
        )
    )
    async with (
        ready_runner(folder, [ServedModel(name="m", make_backend=lambda: backend, slots=4)]) as runner,
        publisher(psutil.Process(backend.process_id).cmdline()) as engine,
    ):
        await engine.publish(stored(b"other", session="other"))
        await runner.until_state(lambda state: state.reports_prefixes)
        yield runner, engine


async def _next(watch: object) -> pb.WatchPrefixesResponse:
    async with asyncio.timeout(10.0):
        message = await watch.read()  # type: ignore[attr-defined]  # a call of grpc
    assert isinstance(message, pb.WatchPrefixesResponse)
    return message


async def test_router_sees_the_digests_that_its_dispatchers_send(tmp_path: Path) -> None:
    text = "A long story about a fox and a crow. " * 60
    mine, theirs, tagged = (_digests(text, *whose) for whose in (("a",), ("b",), ("a", "draft")))
    assert len({*mine, *theirs, *tagged}) == 3 * len(mine) == 6
    async with _reporting_runner(tmp_path) as (runner, engine):
        watch = runner.control.WatchPrefixes(pb.WatchPrefixesRequest(model="m"))
        assert (await _next(watch)) == pb.WatchPrefixesResponse(restart=True)
        request = await _served(runner, text, "a")
        await engine.publish(stored(*range(1, 40), session=request))
        assert sorted((await _next(watch)).held) == sorted(mine)
        request = await _served(runner, text, "a", serve_options_pb2.ServeOptions(cache_tag="draft"))
        await engine.publish(stored(*range(101, 140), session=request))
        assert sorted((await _next(watch)).held) == sorted(tagged)
        unshared = await _served(runner, text, "b", NO_CACHE)
        await engine.publish(stored(*range(201, 240), session=unshared), removed(1))
        assert sorted((await _next(watch)).lost) == sorted(mine)
        another = runner.control.WatchPrefixes(pb.WatchPrefixesRequest(model="m"))
        first = await _next(another)
        assert (first.restart, sorted(first.held)) == (True, sorted(tagged))


async def test_flush_of_a_tenant_loses_its_prefixes_only(tmp_path: Path) -> None:
    text = "A long story about a fox and a crow. " * 60
    async with _reporting_runner(tmp_path) as (runner, engine):
        watch = runner.control.WatchPrefixes(pb.WatchPrefixesRequest(model="m"))
        await _next(watch)
        for tenant, first in (("a", 1), ("b", 101)):
            request = await _served(runner, text, tenant)
            await engine.publish(stored(*range(first, first + 39), session=request))
            await _next(watch)
        permit = await runner.permit(Action.FLUSH, "")
        scope = pb.FlushCacheRequest.SCOPE_TENANT
        await runner.control.FlushCache(pb.FlushCacheRequest(permit=permit, scope=scope, tenant="a"))
        assert sorted((await _next(watch)).lost) == sorted(_digests(text, "a"))
        permit = await runner.permit(Action.FLUSH, "")
        await runner.control.FlushCache(pb.FlushCacheRequest(permit=permit, scope=pb.FlushCacheRequest.SCOPE_ALL))
        changes = [await _next(watch)]
        if not changes[-1].cleared:
            changes.append(await _next(watch))
        assert changes[-1].cleared


async def test_stream_ends_with_the_engine(tmp_path: Path) -> None:
    async with _reporting_runner(tmp_path) as (runner, _):
        watch = runner.control.WatchPrefixes(pb.WatchPrefixesRequest(model="m"))
        await _next(watch)
        await runner.unload()
        async with asyncio.timeout(10.0):
            assert await watch.read() is grpc.aio.EOF
        error = await refusal(runner.control.WatchPrefixes(pb.WatchPrefixesRequest(model="m")).read())
        assert error.reason is Reason.UNSUPPORTED_OPERATION


@pytest.mark.parametrize(("model", "reason"), [("m", Reason.UNSUPPORTED_OPERATION), ("x", Reason.MODEL_NOT_FOUND)])
async def test_engine_without_reports_is_refused(tmp_path: Path, model: str, reason: Reason) -> None:
    async with ready_runner(tmp_path, [fake_model("m", {}, {})]) as runner:
        error = await refusal(runner.control.WatchPrefixes(pb.WatchPrefixesRequest(model=model)).read())
        assert error.reason is reason
