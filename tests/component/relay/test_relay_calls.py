"""Calls over a link: streaming, flow control, cancel, errors, capacity."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import grpc
import pytest
from google.protobuf import descriptor_pool
from relay_harness import (
    LIMIT_SECONDS,
    RUNNER,
    Laptop,
    Mesh,
    frame,
    prompt,
    refusal,
    running_laptop,
    running_mesh_side,
    soon,
    text_of,
)

from router_svc.relay import PROCESS_SERVICE, RELAYED_SERVICES
from runner_svc.dial_out import REGISTRY_SERVICES
from runner_svc.policy.joined_calls import JOINED_CALLS
from weft.api.runner.v1 import runner_service_pb2
from weft.dispatch.operation_table import OPERATIONS
from weft.kernel.channels.rpc import RpcMethod
from weft.kernel.errors.error_tree import WeftError
from weft.kernel.errors.reasons import Reason
from weft.link.carried_calls import CallStream

LARGE_BYTES = 20 * 1024 * 1024


@pytest.fixture
async def laptop(mesh: Mesh) -> AsyncIterator[Laptop]:
    async with running_laptop(mesh) as laptop:
        await laptop.open()
        yield laptop


async def _text(call: Any) -> str:
    texts = []
    while (response := await call.read()) is not grpc.aio.EOF:
        texts.append(text_of(response))
    return "".join(texts)


def test_calls_of_forwarded_services_have_one_request() -> None:
    for service in (*RELAYED_SERVICES, PROCESS_SERVICE, *REGISTRY_SERVICES):
        methods = descriptor_pool.Default().FindServiceByName(service).methods
        assert [method.name for method in methods if method.client_streaming] == []


@pytest.mark.usefixtures("laptop")
async def test_unary_call_is_relayed(mesh: Mesh) -> None:
    described = await mesh.runner.Describe(runner_service_pb2.DescribeRequest(), metadata=mesh.metadata)
    assert described.runner.name == RUNNER


async def test_each_token_is_relayed_as_generated(mesh: Mesh, laptop: Laptop) -> None:
    asked: asyncio.Queue[None] = asyncio.Queue()

    async def one_by_one(_request: Any, _context: Any) -> AsyncIterator[Any]:
        for number in range(5):
            await asked.get()
            yield frame(f"tok{number}")

    laptop.script.generate = one_by_one
    call = mesh.stream()
    for number in range(5):
        asked.put_nowait(None)
        # The next token is not made before this one was read, so that nothing can be held back.
        assert text_of(await soon(call.read())) == f"tok{number}"


async def test_slow_reader_stalls_only_its_own_backend(mesh: Mesh, laptop: Laptop) -> None:
    made = 0

    async def flood(request: Any, _context: Any) -> AsyncIterator[Any]:
        nonlocal made
        if request.completion.suffix == "quick":
            yield frame("quick")
            return
        while True:
            made += 1
            yield frame("x" * 10_000)

    laptop.script.generate = flood
    slow = mesh.stream("slow")
    await soon(slow.read())
    before = -1
    while made != before:
        before = made
        for _ in range(20):
            assert await soon(_text(mesh.stream("quick"))) == "quick"
    assert made * 10_000 < 2 * 1024 * 1024, "the flood was kept instead of being held back"
    slow.cancel()
    assert await soon(laptop.script.cancelled.get()) == "slow"


async def test_deadline_reaches_the_backend(mesh: Mesh, laptop: Laptop) -> None:
    left: list[float] = []

    async def endless(_request: Any, context: Any) -> AsyncIterator[Any]:
        left.append(context.time_remaining())
        yield frame("begun")
        await asyncio.Event().wait()

    laptop.script.generate = endless
    call = mesh.stream("endless", timeout=0.3)
    error = await refusal(_text(call))
    assert error.reason is Reason.DEADLINE_EXCEEDED
    assert 0 < left[0] < 2.0
    assert await soon(laptop.script.cancelled.get()) == "endless"


@pytest.mark.slow("a message of 20 MiB")
async def test_twenty_mebibyte_message_is_relayed_both_ways(mesh: Mesh, laptop: Laptop) -> None:
    async def echo(request: Any, _context: Any) -> AsyncIterator[Any]:
        yield frame(request.completion.suffix)

    laptop.script.generate = echo
    assert len(await soon(_text(mesh.stream("x" * LARGE_BYTES)))) == LARGE_BYTES


async def test_error_is_relayed_with_its_details(mesh: Mesh, laptop: Laptop) -> None:
    async def fail(_request: Any, _context: Any) -> AsyncIterator[Any]:
        yield frame("begun")
        raise WeftError(Reason.SERVER_DIED, "it died", metadata={"model": "m"}, retry_after_seconds=2.0)

    laptop.script.generate = fail
    error = await refusal(_text(mesh.stream()))
    assert (error.reason, error.message, error.metadata) == (Reason.SERVER_DIED, "it died", {"model": "m"})
    assert error.retry_after_seconds == 2.0


async def test_error_reveals_no_address_of_the_laptop(mesh: Mesh, laptop: Laptop) -> None:
    async def fail(_request: Any, _context: Any) -> AsyncIterator[Any]:
        yield frame("begun")
        raise WeftError(Reason.BACKEND_ERROR, "http://localhost:1234/v1 broke", metadata={"at": "127.0.0.1:1234"})

    laptop.script.generate = fail
    call = mesh.stream()
    error = await refusal(_text(call))
    assert (error.reason, error.message) == (Reason.BACKEND_ERROR, "<local>/v1 broke")
    assert error.metadata["at"] == "<local>"


async def test_metadata_reaches_the_runner_without_relay_headers_and_keys(mesh: Mesh, laptop: Laptop) -> None:
    keys = (("authorization", "Bearer weft_of_a_gateway"), ("x-api-key", "weft_of_a_gateway"))
    given: Any = (*mesh.metadata, *keys, ("traceparent", "00-ab"), ("x-bin", b"\xff"))
    assert await soon(_text(mesh.requests.Generate(prompt(), metadata=given))) == "tok0 tok1 tok2 "
    seen = laptop.script.metadata
    assert (seen["traceparent"], seen["x-bin"]) == ("00-ab", b"\xff")
    assert "weft-runner" not in seen
    assert [name for name, value in seen.items() if "weft_of_a_gateway" in str(value)] == []


async def test_runner_without_a_link_is_unreachable(mesh: Mesh) -> None:
    error = await refusal(mesh.stream().read())
    assert error.reason is Reason.RUNNER_UNREACHABLE


async def test_runner_gets_no_more_work_than_its_advertised_capacity(mesh: Mesh) -> None:
    go_on = asyncio.Event()

    async def hold(_request: Any, _context: Any) -> AsyncIterator[Any]:
        yield frame("begun")
        await go_on.wait()

    async with running_laptop(mesh) as laptop:
        laptop.script.generate = hold
        session = await laptop.open(max_requests=2)
        calls = [mesh.stream() for _ in range(2)]
        for call in calls:
            await soon(call.read())
        assert (await refusal(mesh.stream().read())).reason is Reason.NO_SLOT_AVAILABLE
        # What is no work is not counted.
        await mesh.runner.Describe(runner_service_pb2.DescribeRequest(), metadata=mesh.metadata)
        await laptop.beat(session, max_requests=3)
        third = mesh.stream()
        await soon(third.read())
        go_on.set()
        for call in (*calls, third):
            await soon(_text(call))
        await soon(mesh.stream().read())


async def test_calls_per_link_are_limited(tmp_path: Path) -> None:
    async def hold(_request: Any, _context: Any) -> AsyncIterator[Any]:
        yield frame("begun")
        await asyncio.Event().wait()

    async with running_mesh_side(tmp_path, max_calls_per_link=2) as mesh, running_laptop(mesh) as laptop:
        laptop.script.generate = hold
        await laptop.open()
        calls = [mesh.stream() for _ in range(2)]
        for call in calls:
            await soon(call.read())
        assert (await refusal(mesh.stream().read())).reason is Reason.NO_SLOT_AVAILABLE
        calls[0].cancel()
        await soon(laptop.script.cancelled.get())
        await soon(mesh.stream().read())


@pytest.mark.usefixtures("laptop")
async def test_mesh_can_call_only_runner_services(mesh: Mesh) -> None:
    standing = mesh.relay._links[RUNNER]
    call = standing.link.call("/weft.api.registry.v1.RunnerSessionService/CloseSession")
    assert await soon(call.read()) is None
    assert call.status is not None
    assert call.status.code == grpc.StatusCode.UNIMPLEMENTED.value[0]
    with suppress(WeftError):
        call.close()


@pytest.mark.usefixtures("laptop")
async def test_stream_carries_the_requests_of_a_joined_machine_and_none_of_its_other_calls(mesh: Mesh) -> None:
    """The others are separate calls, whose access differs."""
    stream = CallStream(mesh.channel, Reason.WORKER_LOST, Reason.RUNNER_UNREACHABLE)
    requests = {spec.runner_rpc.path for spec in OPERATIONS.values()}
    assert requests < set(JOINED_CALLS)
    for path in JOINED_CALLS:
        service, _, name = path.removeprefix("/").partition("/")
        rpc = RpcMethod(descriptor_pool.Default().FindServiceByName(service).methods_by_name[name])
        call = stream.call(rpc, mesh.metadata, LIMIT_SECONDS)
        await call.write(rpc.request())
        told = ""
        try:
            await soon(call.read())
        except WeftError as error:
            told = error.message
        call.cancel()
        assert (path, told == f"{path} is not carried here") == (path, path not in requests)
