"""Who keeps answers: the limits around the table, and what is over forgotten."""

from collections.abc import Sequence
from datetime import timedelta

from router_svc.responses.config import ResponseLimits
from router_svc.responses.sql import Kept, ResponseTable
from weft.durable.responses import MAX_CHAIN, StoredResponse, response_not_found
from weft.kernel.clock import Clock
from weft.kernel.errors import WeftError, invalid_field
from weft.kernel.reasons import Reason

SWEPT_AT_ONCE = 100
"""Answers that one statement of a sweep moves: others have their turn in between."""


class ResponseKeeper:
    """See `weft.durable.responses.ResponseStore`."""

    def __init__(self, table: ResponseTable, limits: ResponseLimits, clock: Clock) -> None:
        self._table = table
        self._limits = limits
        self._clock = clock
        self._kept: dict[str, Kept] = {}
        """By tenant. Other routers on one database are seen at the next count."""
        self._total_bytes = 0
        """Of all tenants."""

    async def save(self, response: StoredResponse) -> None:
        """See ResponseStore.save."""
        size = len(response.body) + len(response.items)
        if size > self._limits.max_bytes:
            raise WeftError(
                Reason.REQUEST_TOO_LARGE, f"a response that is kept has at most {self._limits.max_bytes} bytes"
            )
        if self._refusal(response.tenant, Kept(1, size)):
            await self._require_replacement(response, size)
        self._add(response.tenant, await self._table.save(response))

    async def get(self, tenant: str, response_id: str) -> StoredResponse:
        """See ResponseStore.get."""
        found = await self._table.get(tenant, response_id)
        if found is None:
            raise response_not_found(response_id)
        return found

    async def chain(self, tenant: str, response_id: str) -> Sequence[StoredResponse]:
        """See ResponseStore.chain. Raises INVALID_ARGUMENT, too, for more bytes than one message may carry."""
        steps = await self._table.chain(tenant, response_id)
        if steps is None:
            raise response_not_found(response_id)
        if len(steps) > MAX_CHAIN:
            raise invalid_field("previous_response_id", f"continues more than {MAX_CHAIN} responses")
        if sum(size for _, size in steps) > self._limits.max_chain_bytes:
            raise invalid_field(
                "previous_response_id", f"continues more than {self._limits.max_chain_bytes} bytes of responses"
            )
        return [await self.get(tenant, step) for step, _ in reversed(steps)]

    async def delete(self, tenant: str, response_id: str) -> None:
        """See ResponseStore.delete."""
        size = await self._table.delete(tenant, response_id)
        if size is None:
            raise response_not_found(response_id)
        self._add(tenant, Kept(-1, -size))

    async def sweep(self) -> None:
        """Forget what is over, and count what is left."""
        now = self._clock.utc_now()
        while await self._table.bring_back(now, SWEPT_AT_ONCE):
            pass
        await self._table.forget_before(now - timedelta(seconds=self._limits.keep_seconds))
        self._kept = dict(await self._table.kept())
        self._total_bytes = sum(kept.size for kept in self._kept.values())

    async def _require_replacement(self, response: StoredResponse, size: int) -> None:
        """A tenant that keeps all it may can still write again what it has."""
        known = await self._table.size_of(response.tenant, response.id)
        more = Kept(1, size) if known is None else Kept(0, size - known)
        refusal = self._refusal(response.tenant, more)
        if refusal:
            raise WeftError(Reason.TOO_MANY_RESOURCES, refusal)

    def _refusal(self, tenant: str, more: Kept) -> str:
        """Why a tenant may not keep so much more; empty: it may."""
        kept, limits = self._kept.get(tenant, Kept()), self._limits
        if kept.count + more.count > limits.max_per_tenant or kept.size + more.size > limits.max_tenant_bytes:
            return "the tenant keeps as many responses as it may; delete some, or send 'store': false"
        if self._total_bytes + more.size > limits.max_total_bytes:
            return "as many responses are kept as may be (router.responses.max_total_bytes); send 'store': false"
        return ""

    def _add(self, tenant: str, more: Kept) -> None:
        kept = self._kept.get(tenant, Kept())
        self._kept[tenant] = Kept(kept.count + more.count, kept.size + more.size)
        self._total_bytes += more.size
