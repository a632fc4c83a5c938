"""A response store in memory, with scripted failures, and requests for responses."""

from asyncio import StreamReader, StreamWriter
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gateway_script import RunningGateway

from router_svc.durable.limits import ResponseLimits
from router_svc.durable.stored_responses import ResponseService
from router_svc.store.database import RouterDatabase
from weft.api.router.v1 import stored_response_service_pb2
from weft.durable.responses import MAX_CHAIN, ResponseClient, response_not_found
from weft.kernel.errors.error_tree import WeftError, invalid_field
from weft.kernel.errors.reasons import Reason
from weft.kernel.time.clock import Clock

MAX_KEPT = 1000
PATH = "/v1/responses"


def body(**fields: object) -> dict[str, object]:
    return {"model": "chat", "input": "Say hello", **fields}


async def answer_of(gateway: RunningGateway, **fields: object) -> Any:
    return (await gateway.request("POST", PATH, body(**fields))).json


async def id_once_streamed(
    gateway: RunningGateway, reader: StreamReader, writer: StreamWriter, **fields: object
) -> str:
    """The id of a streamed response that has begun with the text "Hel"."""
    writer.write(gateway.post(PATH, body(stream=True, **fields)))
    seen = await reader.readuntil(b'"delta":"Hel"')
    return seen.split(b'"id":"')[1].split(b'"')[0].decode()


@dataclass
class MemoryResponses(ResponseClient):
    """A response store. `failure` is raised by every method, `save_failure` by `save` alone."""

    kept: dict[str, stored_response_service_pb2.StoredResponse] = field(default_factory=dict)
    failure: WeftError | None = None
    save_failure: WeftError | None = None

    async def save(self, response: stored_response_service_pb2.StoredResponse, *, holder: str = "") -> None:
        self._fail()
        if self.save_failure is not None:
            raise self.save_failure
        if len(self.kept) >= MAX_KEPT:
            raise WeftError(Reason.TOO_MANY_RESOURCES, f"at most {MAX_KEPT} responses are kept")
        self.kept[response.id] = response

    async def get(self, tenant: str, response_id: str) -> stored_response_service_pb2.StoredResponse:
        self._fail()
        found = self.kept.get(response_id)
        if found is None or found.tenant != tenant:
            raise response_not_found(response_id)
        return found

    async def chain(self, tenant: str, response_id: str) -> Sequence[stored_response_service_pb2.StoredResponse]:
        found = [await self.get(tenant, response_id)]
        while found[-1].previous_id:
            if len(found) == MAX_CHAIN:
                raise invalid_field("previous_response_id", f"continues more than {MAX_CHAIN} responses")
            found.append(await self.get(tenant, found[-1].previous_id))
        return found[::-1]

    async def delete(self, tenant: str, response_id: str) -> None:
        await self.get(tenant, response_id)
        del self.kept[response_id]

    def _fail(self) -> None:
        if self.failure is not None:
            raise self.failure


@asynccontextmanager
async def router_store(
    folder: Path, limits: ResponseLimits | None = None, clock: Clock | None = None
) -> AsyncIterator[ResponseClient]:
    """The store of a router, whose database is in `folder`."""
    service = ResponseService(RouterDatabase(folder / "router.db"), limits or ResponseLimits(), clock)
    await service.start()
    try:
        yield service.store
    finally:
        await service.stop(0)
