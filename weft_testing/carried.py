"""Calls of requests on streams, for tests: both ends with the shapes of generated stubs and servicers."""

import asyncio
from collections.abc import AsyncIterator, Callable, Generator
from functools import partial
from inspect import isasyncgen
from typing import Any

import grpc

from weft.kernel.channels.rpc import RpcMethod
from weft.kernel.errors.reasons import Reason
from weft.link.carried_calls import CallStream, CarriedCalls
from weft.link.frames import Metadata


def _methods(modules: tuple[Any, ...]) -> list[RpcMethod]:
    services = (service for module in modules for service in module.DESCRIPTOR.services_by_name.values())
    return [RpcMethod(method) for service in services for method in service.methods]


def carry(server: grpc.aio.Server, servicer: Any, *modules: Any) -> CarriedCalls:
    """Adds what a servicer has of the services in generated `modules` to a server, on streams."""
    served: dict[RpcMethod, Callable[[Any, Any], Any]] = {
        rpc: partial(_serve, getattr(servicer, rpc.name)) for rpc in _methods(modules) if hasattr(servicer, rpc.name)
    }
    carried = CarriedCalls(served)
    carried.add_to_server(server)
    return carried


async def _serve(serve: Callable[[Any, Any], Any], request: Any, context: Any) -> Any:
    answers = serve(request, context)
    if not isasyncgen(answers):
        return await answers
    try:
        async for answer in answers:
            await context.write(answer)
    finally:
        await answers.aclose()
    return None


class CarriedStub:
    """A stub of the services in generated modules, whose calls share a stream of a channel."""

    def __init__(self, channel: grpc.aio.Channel, *modules: Any) -> None:
        self._stream = CallStream(channel, Reason.WORKER_LOST, Reason.RUNNER_UNREACHABLE)
        self._rpcs = {rpc.name: rpc for rpc in _methods(modules)}

    def __getattr__(self, name: str) -> Any:
        return partial(StubCall, self._stream, self._rpcs[name])


class StubCall:
    """A call of a stub: await it for the answer of a unary one, iterate or read that of a streamed one."""

    def __init__(
        self, stream: CallStream, rpc: RpcMethod, request: Any, metadata: Metadata = (), timeout: float | None = None
    ) -> None:
        self._call = stream.call(rpc, metadata, timeout)
        self._writing = asyncio.ensure_future(self._call.write(request))
        self.read, self.cancel, self.done = self._call.read, self._call.cancel, self._call.done

    def __await__(self) -> Generator[Any, None, Any]:
        return self.read().__await__()

    async def __aiter__(self) -> AsyncIterator[Any]:
        while (message := await self.read()) is not grpc.aio.EOF:
            yield message
