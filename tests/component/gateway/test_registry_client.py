"""The registry client against a scripted registry over gRPC."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from gateway_script import FixedFleet
from kit.grpc_server import served

from gateway.registry_client import RegistryCalls, RegistryClient
from weft.api.registry.v1 import (
    declaration_service_pb2,
    declaration_service_pb2_grpc,
    event_pb2,
    registry_service_pb2_grpc,
)
from weft.api.registry.v1.registry_service_pb2 import WatchEventsRequest, WatchEventsResponse
from weft.documents.resource_kinds import ResourceKind
from weft.kernel.channels.rpc import answering, open_channel
from weft.kernel.errors.error_tree import WeftError
from weft.kernel.errors.reasons import Reason

Answer = Callable[[Any], Any]


class ScriptedServicer(
    registry_service_pb2_grpc.RegistryServiceServicer, declaration_service_pb2_grpc.DeclarationServiceServicer
):
    """Answers by rpc name; an exception is raised as the rpc's error."""

    def __init__(self, answers: dict[str, Answer | Exception]) -> None:
        for name, answer in answers.items():
            setattr(self, name, self._rpc(answer))

    def _rpc(self, answer: Answer | Exception) -> Callable[[Any, Any], Any]:
        async def rpc(request: Any, context: Any) -> Any:
            async with answering(context):
                if isinstance(answer, Exception):
                    raise answer
                found = answer(request)
                return await found if asyncio.iscoroutine(found) else found

        return rpc

    async def WatchEvents(  # noqa: N802 - the rpc's name
        self, request: WatchEventsRequest, context: Any
    ) -> AsyncIterator[WatchEventsResponse]:
        async with answering(context):
            yield WatchEventsResponse(event=event_pb2.Event(sequence=7, kind="agent", name="coder"))
            if request.name:
                raise WeftError(Reason.WATCH_LAGGED, "read faster")


@asynccontextmanager
async def connected(
    folder: Path, answers: dict[str, Answer | Exception] | None = None, *, timeout_seconds: float = 30.0
) -> AsyncIterator[RegistryClient]:
    servicer: Any = ScriptedServicer(answers or {})  # type: ignore[abstract]  # only what is asked
    async with served(
        partial(registry_service_pb2_grpc.add_RegistryServiceServicer_to_server, servicer),
        partial(declaration_service_pb2_grpc.add_DeclarationServiceServicer_to_server, servicer),
        address=f"unix:{folder / 'registry.sock'}",
    ) as channel:
        yield RegistryClient(channel, FixedFleet.of(), timeout_seconds=timeout_seconds)


async def test_watch_yields_events_until_it_ends_with_a_reason(tmp_path: Path) -> None:
    async with connected(tmp_path) as client:
        for wanted, reason in (
            (WatchEventsRequest(), Reason.SERVICE_UNAVAILABLE),
            (WatchEventsRequest(kind="agent", name="coder"), Reason.WATCH_LAGGED),
        ):
            watch = client.watch_events(wanted)
            assert (await anext(watch)).sequence == 7
            with pytest.raises(WeftError) as caught:
                await anext(watch)
            assert caught.value.reason is reason


async def test_apply_without_an_outcome_is_an_internal_error(tmp_path: Path) -> None:
    def silent(_: Any) -> declaration_service_pb2.ApplyResponse:
        return declaration_service_pb2.ApplyResponse(results=[declaration_service_pb2.ApplyResult(name="x")])

    async with connected(tmp_path, {"Apply": silent}) as client:
        with pytest.raises(WeftError) as caught:
            await client.apply([], dry_run=False, adopt=False)
    assert caught.value.reason is Reason.INTERNAL


async def test_conflict_with_an_owner_of_another_kind_is_reported(tmp_path: Path) -> None:
    taken = WeftError(Reason.ALREADY_EXISTS, "tiny is a runner already", metadata={"owner_kind": "runner"})
    async with connected(tmp_path, {"Apply": taken}) as client:
        with pytest.raises(WeftError) as caught:
            await client.apply([], dry_run=False, adopt=False)
    assert (caught.value.reason, caught.value.metadata["owner_kind"]) == (Reason.ALREADY_EXISTS, "runner")
    assert "runner" in caught.value.message


async def test_unresponsive_registry_is_a_timeout(tmp_path: Path) -> None:
    async with connected(tmp_path, {"GetResource": lambda _: asyncio.Event().wait()}, timeout_seconds=0.05) as client:
        with pytest.raises(WeftError, match="did not answer within") as caught:
            await client.get(ResourceKind.MODEL, "x")
    assert caught.value.reason is Reason.DEADLINE_EXCEEDED


async def test_unreachable_registry_is_unavailable(tmp_path: Path) -> None:
    channel = open_channel(f"unix:{tmp_path}/nobody.sock")
    client = RegistryClient(channel, FixedFleet.of(), timeout_seconds=30)
    with pytest.raises(WeftError, match="registry cannot be reached") as caught:
        await client.get(ResourceKind.MODEL, "x")
    assert caught.value.reason is Reason.SERVICE_UNAVAILABLE
    with pytest.raises(WeftError) as watched:
        await anext(client.watch_events(WatchEventsRequest()))
    assert watched.value.reason is Reason.SERVICE_UNAVAILABLE
    await channel.close(grace=None)


@pytest.mark.parametrize("reason", [Reason.SERVICE_UNAVAILABLE, Reason.REGISTRY_STANDBY])
async def test_registry_that_answers_is_not_called_unreachable(tmp_path: Path, reason: Reason) -> None:
    """A full disk of the registry was reported as a registry that cannot be reached, which sent its reader away."""
    full = WeftError(reason, "the registry's database failed: it cannot be written", retry_after_seconds=1.0)
    async with connected(tmp_path, {"GetResource": full}) as client:
        with pytest.raises(WeftError) as caught:
            await client.get(ResourceKind.MODEL, "x")
    assert (caught.value.reason, caught.value.message) == (Reason.SERVICE_UNAVAILABLE, full.message)
    assert caught.value.retry_after_seconds == 1.0


class CutCall:
    """A stream on a channel that is closed under it, as that of an old certificate."""

    def __aiter__(self) -> "CutCall":
        return self

    async def __anext__(self) -> object:
        raise asyncio.CancelledError

    def cancel(self) -> None:
        """Does nothing."""


async def cut(_request: object, *, timeout: float) -> object:
    del timeout
    raise asyncio.CancelledError


async def test_call_on_a_closed_channel_finds_no_registry() -> None:
    """The CancelledError of gRPC ended the watch behind all streams of resources, which then stayed as they were."""
    calls = RegistryCalls(str, timeout_seconds=30)
    with pytest.raises(WeftError, match="registry cannot be reached") as watched:
        await anext(calls.follow(CutCall()))
    with pytest.raises(WeftError, match="registry cannot be reached") as asked:
        await calls.call(cut, None)
    assert watched.value.reason is asked.value.reason is Reason.SERVICE_UNAVAILABLE


async def test_older_registry_lacks_the_method(tmp_path: Path) -> None:
    async with connected(tmp_path) as client:
        with pytest.raises(WeftError) as caught:
            await client.get(ResourceKind.AGENT, "x")
    assert caught.value.reason is Reason.UNSUPPORTED_OPERATION
