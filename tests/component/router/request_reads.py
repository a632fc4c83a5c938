"""RequestService over a socket, for a router that runs no requests."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from router_svc.request_servicer import RequestServicer
from weft.api.router.v1 import request_service_pb2_grpc
from weft.durable.requests import RequestClient
from weft.kernel.reasons import Reason
from weft.kernel.rpc import new_server, open_channel


class NothingRuns:
    """A scheduling loop without requests."""

    def cancel(self, request_id: str, tenant: str, cancelled_by: str) -> dict[int, asyncio.Future[None]]:
        del request_id, tenant, cancelled_by
        return {}

    def finish(self, key: int, reason: Reason) -> None:
        raise AssertionError(key, reason)


@asynccontextmanager
async def remote(servicer: RequestServicer, folder: Path) -> AsyncIterator[RequestClient]:
    server = new_server()
    request_service_pb2_grpc.add_RequestServiceServicer_to_server(servicer, server)
    address = f"unix:{folder / 'router.sock'}"
    server.add_insecure_port(address)
    await server.start()
    channel = open_channel(address)
    try:
        yield RequestClient(channel)
    finally:
        await channel.close(grace=None)
        await server.stop(grace=None)
