"""Request tickets, signed by the router, and operation permits, signed by the registry. Runners check both.

HMAC-SHA256 over the serialized claims with the key of the runner's session. The bytes are verified before they are
parsed; the algorithm is never taken from the ticket. Permits are signed with a separate prefix, so that neither can be
used as the other.
"""

import hashlib
import hmac
from dataclasses import dataclass
from enum import IntEnum
from heapq import heappop, heappush

from weft.api.runner.v1 import permit_pb2, ticket_pb2
from weft.kernel.errors.error_tree import WeftError
from weft.kernel.errors.reasons import Reason
from weft.kernel.values.names import new_id

TICKET_LIFETIME_SECONDS = 30.0
MAX_REMEMBERED_TICKETS = 65_536
RETRY_AFTER_SECONDS = 1.0
"""Retry-After of a runner that is not registered yet."""


def sign(claims: bytes, key: bytes) -> bytes:
    """Returns the message authentication code of serialized claims."""
    return hmac.digest(key, claims, hashlib.sha256)


class _Gate:
    """Checks tickets or permits for one runner incarnation; each is accepted once, and remembered until it expires."""

    max_remembered: int
    """Further ones are rejected."""

    def __init__(self, *, runner: str, incarnation: str) -> None:
        self._runner = runner
        self._incarnation = incarnation
        self._key: bytes | None = None
        self._used = set[str]()
        self._ends: list[tuple[float, str]] = []
        """A heap of when the used ones expire: after a clock was set back, not in their order."""

    def use_key(self, key: bytes) -> None:
        """Accepts only those of the session with this key."""
        self._key = key

    def _is_own(self, claims: ticket_pb2.TicketClaims | permit_pb2.PermitClaims) -> bool:
        return claims.runner == self._runner and claims.runner_incarnation == self._incarnation

    def _is_first_use(self, claim_id: str, expires: float, now: float) -> bool:
        """Remembers an id; returns False if it is known, or if there is no room."""
        while self._ends and self._ends[0][0] <= now:
            self._used.discard(heappop(self._ends)[1])
        if claim_id in self._used or len(self._used) >= self.max_remembered:
            return False
        self._used.add(claim_id)
        heappush(self._ends, (expires, claim_id))
        return True


class TicketGate(_Gate):
    """Checks tickets. Runners have few slots and tickets live for seconds, so only a flood fills the memory."""

    max_remembered = MAX_REMEMBERED_TICKETS

    def admit(self, ticket: ticket_pb2.Ticket, *, now: float) -> ticket_pb2.TicketClaims:
        """Returns the claims of a valid ticket. `now` is in Unix seconds.

        Raises TICKET_INVALID or TICKET_EXPIRED; the message does not say which check failed. Raises BACKEND_NOT_READY
        before there is a session, since no ticket can be verified yet.
        """
        claims = self._verified(ticket)
        if claims is None:
            raise _refused(Reason.TICKET_INVALID)
        expires = claims.expire_time.seconds + claims.expire_time.nanos / 1e9
        if now >= expires:
            raise _refused(Reason.TICKET_EXPIRED)
        if not self._is_first_use(claims.ticket_id, expires, now):
            raise _refused(Reason.TICKET_INVALID)
        return claims

    def _verified(self, ticket: ticket_pb2.Ticket) -> ticket_pb2.TicketClaims | None:
        """Returns the claims of a ticket signed for this runner; None: the signature or runner is wrong."""
        if not ticket.mac:
            return None
        if self._key is None:
            raise WeftError(
                Reason.BACKEND_NOT_READY,
                "the runner is not registered with the mesh yet; see its log and `weft describe runner` for the reason",
                retry_after_seconds=RETRY_AFTER_SECONDS,
            )
        if not hmac.compare_digest(sign(ticket.claims, self._key), ticket.mac):
            return None
        claims = ticket_pb2.TicketClaims.FromString(ticket.claims)
        return claims if self._is_own(claims) else None


def _refused(reason: Reason) -> WeftError:
    return WeftError(reason, "the ticket was refused; requests go through a router, not to a runner directly")


PERMIT_LIFETIME_SECONDS = 30.0
MAX_REMEMBERED_PERMITS = 4_096
_PREFIX = b"weft-operation-permit-v1\0"


class Action(IntEnum):
    """The permitted action; numbers as in `runner.v1.PermitClaims.Action`."""

    LOAD = 1
    UNLOAD = 2
    FLUSH = 3
    YIELD = 4
    PULL = 5
    ADD = 6
    REMOVE = 7


@dataclass(frozen=True, slots=True, kw_only=True)
class PermitTarget:
    """The runner that a permit is for, and its session's key."""

    runner: str
    incarnation: str
    key: bytes


def make_permit(
    target: PermitTarget, action: Action, *, model: str, operation_id: str, now: float
) -> permit_pb2.OperationPermit:
    """Returns a permit that is valid for PERMIT_LIFETIME_SECONDS from `now` (Unix seconds)."""
    claims = permit_pb2.PermitClaims(
        permit_id=new_id("permit"),
        operation_id=operation_id,
        action=action.value,  # type: ignore[arg-type]  # same numbers
        runner=target.runner,
        runner_incarnation=target.incarnation,
        model=model,
    )
    claims.expire_time.FromNanoseconds(int((now + PERMIT_LIFETIME_SECONDS) * 1e9))
    data = claims.SerializeToString()
    return permit_pb2.OperationPermit(claims=data, mac=_code(data, target.key))


class PermitGate(_Gate):
    """Checks permits."""

    max_remembered = MAX_REMEMBERED_PERMITS

    def admit(self, permit: permit_pb2.OperationPermit, action: Action, *, model: str, now: float) -> str:
        """Returns the operation's id. `now` is in Unix seconds.

        Raises PERMIT_INVALID; the message does not say which check failed.
        """
        if self._key is None or not hmac.compare_digest(_code(permit.claims, self._key), permit.mac):
            raise _permit_refused()
        claims = permit_pb2.PermitClaims.FromString(permit.claims)
        expires = claims.expire_time.ToNanoseconds() / 1e9
        if not self._is_own(claims) or now >= expires or (claims.action, claims.model) != (action.value, model):
            raise _permit_refused()
        if not self._is_first_use(claims.permit_id, expires, now):
            raise _permit_refused()
        return claims.operation_id


def _code(claims: bytes, key: bytes) -> bytes:
    return hmac.digest(key, _PREFIX + claims, hashlib.sha256)


def _permit_refused() -> WeftError:
    return WeftError(
        Reason.PERMIT_INVALID, "the permit was refused; operations go through the registry, not to a runner directly"
    )
