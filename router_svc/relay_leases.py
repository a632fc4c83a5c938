"""Calls of dial-out runners to the book of memory: each for its own leases, and for nobody else's."""

from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, cast

import grpc
from google.protobuf.message import Message

from router_svc.relay_links import LinkSession, require_own
from weft.api.registry.v1 import lease_pb2, lease_service_pb2_grpc
from weft.api.registry.v1 import lease_service_pb2 as pb
from weft.kernel.errors import WeftError
from weft.kernel.reasons import Reason
from weft.link.link import LinkCall

if TYPE_CHECKING:
    from weft.api.registry.v1.lease_service_pb2_grpc import LeaseServiceAsyncStub

CALL_TIMEOUT_SECONDS = 5.0
_PREFIX = "/weft.api.registry.v1.LeaseService/"

Answering = Callable[[LinkCall, LinkSession, bytes], Awaitable[None]]


class RelayedLeases:
    """Answers what runners ask of the registry's LeaseService over their links."""

    def __init__(self, registry: grpc.aio.Channel) -> None:
        self._leases = cast("LeaseServiceAsyncStub", lease_service_pb2_grpc.LeaseServiceStub(registry))
        self.methods: dict[str, Answering] = {
            f"{_PREFIX}AcquireLease": self._acquire,
            f"{_PREFIX}RenewLeases": self._renew,
            f"{_PREFIX}ReleaseLease": self._release,
            f"{_PREFIX}ReleaseEarlierLives": self._release_earlier_lives,
        }
        """By full name. Each raises WeftError, AioRpcError, and DecodeError for what cannot be read."""

    async def _acquire(self, call: LinkCall, session: LinkSession, data: bytes) -> None:
        request = pb.AcquireLeaseRequest.FromString(data)
        _require_own_leases(session, request.session_id, request.holder)
        _require_own_host(session, request.sighting)
        # As long as the runner waits: the link's call ends with it, and the registry bounds the wait.
        waiting = self._leases.AcquireLease(request)
        try:
            async for response in waiting:
                await call.send(response.SerializeToString())
        finally:
            waiting.cancel()

    async def _renew(self, call: LinkCall, session: LinkSession, data: bytes) -> None:
        request = pb.RenewLeasesRequest.FromString(data)
        _require_own_leases(session, request.session_id, request.holder)
        _require_own_host(session, request.sighting)
        await _send(call, await self._leases.RenewLeases(request, timeout=CALL_TIMEOUT_SECONDS))

    async def _release(self, call: LinkCall, session: LinkSession, data: bytes) -> None:
        request = pb.ReleaseLeaseRequest.FromString(data)
        _require_own_leases(session, request.session_id, request.holder)
        await _send(call, await self._leases.ReleaseLease(request, timeout=CALL_TIMEOUT_SECONDS))

    async def _release_earlier_lives(self, call: LinkCall, session: LinkSession, data: bytes) -> None:
        request = pb.ReleaseEarlierLivesRequest.FromString(data)
        _require_own_leases(session, request.session_id, request.holder)
        await _send(call, await self._leases.ReleaseEarlierLives(request, timeout=CALL_TIMEOUT_SECONDS))


def _require_own_leases(session: LinkSession, session_id: str, holder: lease_pb2.LeaseHolder) -> None:
    require_own(session, session_id)
    own = (lease_pb2.LeaseHolder.KIND_RUNNER, session.runner, session.incarnation)
    if (holder.kind, holder.name, holder.incarnation) != own:
        raise WeftError(Reason.PERMISSION_DENIED, f"over this link only leases of {session.runner} are held")


def _require_own_host(session: LinkSession, sighting: lease_pb2.HostSighting) -> None:
    """What is said to be seen on a host decides when leases there are over: nobody speaks of another's."""
    if not session.host or sighting.host != session.host:
        raise WeftError(
            Reason.PERMISSION_DENIED,
            f"over this link only {session.host or 'no host'} is spoken of, as its session was opened from there",
        )


async def _send(call: LinkCall, response: Message) -> None:
    await call.send(response.SerializeToString())
