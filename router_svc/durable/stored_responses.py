"""Stored responses, which later requests may continue: the store, tenant quotas, and the service."""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import grpc
from typing_extensions import override

from router_svc.durable.clock_clamp import BoundedMoment, bring_back
from router_svc.durable.limits import ResponseLimits
from router_svc.durable.store_service import Rpcs, StoreService
from router_svc.store.database import RouterDatabase
from weft.api.router.v1 import stored_response_service_pb2, stored_response_service_pb2_grpc
from weft.api.router.v1 import stored_response_service_pb2 as pb
from weft.durable.responses import MAX_CHAIN, ResponseClient, response_not_found
from weft.kernel.channels.rpc import AnsweringServicer
from weft.kernel.errors.error_tree import WeftError, invalid_field
from weft.kernel.errors.reasons import Reason
from weft.kernel.time.clock import Clock, SystemClock
from weft.kernel.time.timestamps import datetime_of, stamp_of
from weft.kernel.values.names import MAX_REQUEST_ID_CHARS, MAX_TENANT_CHARS, require_token
from weft.sql.connections import Tx
from weft.sql.sweeper import Sweeper

SWEPT_AT_ONCE = 100
"""Maximum responses changed per statement of a sweep, so that other writes run in between."""

Context = grpc.aio.ServicerContext[Any, Any]

_CREATED = BoundedMoment("responses", "id", "created_at")


@dataclass(frozen=True, slots=True)
class Usage:
    """Number and size of a tenant's responses."""

    count: int = 0
    size: int = 0
    """Bytes."""


class StoredResponseServicer(AnsweringServicer, stored_response_service_pb2_grpc.StoredResponseServiceServicer):
    """StoredResponseService of a router, with its quotas."""

    def __init__(self, database: RouterDatabase, limits: ResponseLimits, clock: Clock) -> None:
        self._database = database
        self._limits = limits
        self._clock = clock
        self._usage: dict[str, Usage] = {}
        self._total_bytes = 0

    @override
    async def SaveResponse(self, request: pb.SaveResponseRequest, context: Context) -> pb.SaveResponseResponse:
        response, holder = _checked(request.response), request.holder
        size = len(response.body) + len(response.items)
        if size > self._limits.max_bytes:
            raise WeftError(Reason.REQUEST_TOO_LARGE, f"a stored response has at most {self._limits.max_bytes} bytes")
        self._add(response.tenant, await self._write(response, size, holder))
        return pb.SaveResponseResponse()

    @override
    async def GetResponse(self, request: pb.GetResponseRequest, context: Context) -> pb.GetResponseResponse:
        return pb.GetResponseResponse(response=await self._get(*_named(request)))

    async def _get(self, tenant: str, response_id: str) -> pb.StoredResponse:
        row = await self._database.row(
            "SELECT * FROM responses WHERE id = :id AND tenant = :tenant", id=response_id, tenant=tenant
        )
        if row is None:
            raise response_not_found(response_id)
        return pb.StoredResponse(
            id=row.id,
            tenant=row.tenant,
            previous_id=row.previous_id,
            create_time=stamp_of(row.created_at),
            body=row.body,
            items=row.items,
            holder="" if row.held_until is not None and row.held_until <= self._clock.utc_now() else row.holder,
        )

    @override
    async def ListChain(self, request: pb.ListChainRequest, context: Context) -> pb.ListChainResponse:
        """Returns a conversation, oldest first. Raises INVALID_ARGUMENT above `max_chain_bytes`."""
        tenant, response_id = _named(request)
        steps = await self._steps(tenant, response_id)
        if len(steps) > MAX_CHAIN:
            raise invalid_field("previous_response_id", f"continues more than {MAX_CHAIN} responses")
        if sum(size for _, size in steps) > self._limits.max_chain_bytes:
            raise invalid_field(
                "previous_response_id", f"continues more than {self._limits.max_chain_bytes} bytes of responses"
            )
        return pb.ListChainResponse(responses=[await self._get(tenant, step) for step, _ in reversed(steps)])

    @override
    async def HoldResponse(self, request: pb.HoldResponseRequest, context: Context) -> pb.HoldResponseResponse:
        tenant, response_id = _named(request)
        now, holder = self._clock.utc_now(), require_token(request.holder, "holder", MAX_REQUEST_ID_CHARS)
        until = now + request.duration.ToTimedelta() if request.HasField("duration") else None
        change = """UPDATE responses SET holder = :holder, held_until = :until WHERE id = :id AND tenant = :tenant
            AND (held_until <= :now OR holder IN ('', :holder, :former))"""
        values = {"until": until, "now": now, "holder": holder, "former": request.former_holder}
        if not await self._database.change(change, id=response_id, tenant=tenant, **values):
            await self._get(tenant, response_id)
            raise WeftError(Reason.RESOURCE_IN_USE, f"another writer holds {response_id}")
        return pb.HoldResponseResponse()

    @override
    async def DeleteResponse(self, request: pb.DeleteResponseRequest, context: Context) -> pb.DeleteResponseResponse:
        tenant, response_id = _named(request)
        remove = "DELETE FROM responses WHERE id = :id AND tenant = :tenant RETURNING size"
        size: int | None = await self._database.run(lambda tx: tx.value(remove, id=response_id, tenant=tenant))
        if size is None:
            raise response_not_found(response_id)
        self._add(tenant, Usage(-1, -size))
        return pb.DeleteResponseResponse()

    async def sweep(self) -> None:
        """Purges expired responses and counts the usage of all tenants."""
        now = self._clock.utc_now()
        while await self._database.run(lambda tx: bring_back(tx, [_CREATED], now, SWEPT_AT_ONCE)):
            pass
        expired = now - timedelta(seconds=self._limits.keep_seconds)
        await self._database.change("DELETE FROM responses WHERE created_at < :expired", expired=expired)
        usages = await self._database.rows(
            "SELECT tenant, count(*) AS number, sum(size) AS bytes FROM responses GROUP BY tenant"
        )
        self._usage = {row.tenant: Usage(row.number, int(row.bytes)) for row in usages}
        self._total_bytes = sum(usage.size for usage in self._usage.values())

    async def _write(self, response: pb.StoredResponse, size: int, holder: str) -> Usage:
        """Inserts or replaces a response; returns the change of the tenant's usage. `holder`: replaces only its own.

        Raises ALREADY_EXISTS if the id belongs to another tenant, TOO_MANY_RESOURCES if the quota is used up.
        """
        values: dict[str, Any] = {
            "id": response.id,
            "tenant": response.tenant,
            "previous_id": response.previous_id,
            "created_at": datetime_of(response.create_time),
            "size": size,
            "body": response.body,
            "items": response.items,
            "holder": "",
        }

        def put(tx: Tx) -> Usage:
            found = tx.row("SELECT tenant, size, holder FROM responses WHERE id = :id", id=response.id)
            if holder and (found is None or found.tenant != response.tenant):
                raise response_not_found(response.id)
            if holder and found.holder != holder:
                raise WeftError(Reason.RESOURCE_IN_USE, f"another writer holds {response.id}")
            if found is not None and found.tenant != response.tenant:
                raise WeftError(Reason.ALREADY_EXISTS, "a response with this id exists")
            more = Usage(1, size) if found is None else Usage(0, size - found.size)
            if refusal := self._refusal(response.tenant, more):
                raise WeftError(Reason.TOO_MANY_RESOURCES, refusal)
            if found is None:
                tx.insert("responses", values)
            else:
                tx.update("responses", "id", values)
            return more

        return await self._database.run(put)

    async def _steps(self, tenant: str, response_id: str) -> Sequence[tuple[str, int]]:
        """Returns ids and sizes of a response and its predecessors, newest first, at most MAX_CHAIN + 1.

        Raises NOT_FOUND if one of them no longer exists.
        """

        def follow(tx: Tx) -> Sequence[tuple[str, int]]:
            found: list[tuple[str, int]] = []
            wanted = response_id
            while wanted and len(found) <= MAX_CHAIN:
                step = "SELECT previous_id, size FROM responses WHERE id = :id AND tenant = :tenant"
                row = tx.row(step, id=wanted, tenant=tenant)
                if row is None:
                    raise response_not_found(wanted, before=found[-1][0] if found else "")
                found.append((wanted, row.size))
                wanted = row.previous_id
            return found

        return await self._database.read(follow)

    def _refusal(self, tenant: str, more: Usage) -> str:
        """Returns why a tenant may not store this much more; empty: it may."""
        usage, limits = self._usage.get(tenant, Usage()), self._limits
        if usage.count + more.count > limits.max_per_tenant or usage.size + more.size > limits.max_tenant_bytes:
            return "the tenant has as many stored responses as it may; delete some, or send 'store': false"
        if self._total_bytes + more.size > limits.max_total_bytes:
            return (
                "the router stores as many responses as it may (router.responses.max_total_bytes); send 'store': false"
            )
        return ""

    def _add(self, tenant: str, more: Usage) -> None:
        usage = self._usage.get(tenant, Usage())
        self._usage[tenant] = Usage(usage.count + more.count, usage.size + more.size)
        self._total_bytes += more.size


def _named(
    request: pb.GetResponseRequest | pb.ListChainRequest | pb.HoldResponseRequest | pb.DeleteResponseRequest,
) -> tuple[str, str]:
    tenant = require_token(request.tenant, "tenant", MAX_TENANT_CHARS)
    return tenant, require_token(request.id, "id", MAX_REQUEST_ID_CHARS)


def _checked(response: pb.StoredResponse) -> pb.StoredResponse:
    """Returns the response after validation. Raises INVALID_ARGUMENT naming the field."""
    if not response.HasField("create_time"):
        raise invalid_field("response.create_time", "is required")
    require_token(response.id, "response.id", MAX_REQUEST_ID_CHARS)
    require_token(response.tenant, "response.tenant", MAX_TENANT_CHARS)
    if response.previous_id:
        require_token(response.previous_id, "response.previous_id", MAX_REQUEST_ID_CHARS)
    return response


class ResponseService(StoreService):
    """Serves a router's stored responses."""

    def __init__(self, database: RouterDatabase, limits: ResponseLimits, clock: Clock | None = None) -> None:
        clock = clock or SystemClock()
        servicer = StoredResponseServicer(database, limits, clock)
        sweeps = {"responses": servicer.sweep}
        super().__init__(
            database,
            Sweeper("response-sweeper", sweeps, limits.sweep_interval_seconds, clock),
            Rpcs(
                stored_response_service_pb2.DESCRIPTOR.services_by_name["StoredResponseService"].full_name,
                stored_response_service_pb2_grpc.add_StoredResponseServiceServicer_to_server,
                servicer,
            ),
        )
        self.store = ResponseClient(servicer)
        """Client of the service in this process."""
