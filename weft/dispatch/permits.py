"""Operation permits: signing in the registry, checking in the runner.

As tickets (see `tickets`), with a prefix of their own under the code, so that neither passes for the other.
"""

import hashlib
import hmac
from collections import OrderedDict
from dataclasses import dataclass
from enum import IntEnum

from weft.api.runner.v1 import permit_pb2
from weft.kernel.errors import WeftError
from weft.kernel.ids import new_id
from weft.kernel.reasons import Reason

PERMIT_LIFETIME_SECONDS = 30.0
MAX_REMEMBERED_PERMITS = 4_096
_PREFIX = b"weft-operation-permit-v1\0"


class Action(IntEnum):
    """What a permit allows; numbers as in `runner.v1.PermitClaims.Action`."""

    LOAD = 1
    UNLOAD = 2
    FLUSH = 3
    YIELD = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class PermitTarget:
    """The runner that a permit is for, and its session's key."""

    runner: str
    incarnation: str
    key: bytes


def make_permit(
    target: PermitTarget, action: Action, *, model: str, operation_id: str, now: float
) -> permit_pb2.OperationPermit:
    """A permit good for PERMIT_LIFETIME_SECONDS from `now`, UTC seconds since the epoch."""
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


class PermitGate:
    """Checks permits for one runner incarnation; each passes once.

    Used ones are remembered until they expire, at most MAX_REMEMBERED_PERMITS of them; a flood beyond that is refused.
    """

    def __init__(self, *, runner: str, incarnation: str) -> None:
        self._runner = runner
        self._incarnation = incarnation
        self._key: bytes | None = None
        self._used: OrderedDict[str, float] = OrderedDict()

    def use_key(self, key: bytes) -> None:
        """Accept permits of the session whose key this is, and of no other."""
        self._key = key

    def admit(self, permit: permit_pb2.OperationPermit, action: Action, *, model: str, now: float) -> str:
        """The operation's id. `now` is UTC in seconds since the epoch.

        Raises PERMIT_INVALID; the message does not say which check failed.
        """
        if self._key is None or not hmac.compare_digest(_code(permit.claims, self._key), permit.mac):
            raise _refused()
        claims = permit_pb2.PermitClaims.FromString(permit.claims)
        expires = claims.expire_time.ToNanoseconds() / 1e9
        if (claims.runner, claims.runner_incarnation) != (self._runner, self._incarnation) or now >= expires:
            raise _refused()
        if (claims.action, claims.model) != (action.value, model):
            raise _refused()
        self._remember(claims.permit_id, expires, now)
        return claims.operation_id

    def _remember(self, permit_id: str, expires: float, now: float) -> None:
        while self._used and next(iter(self._used.values())) <= now:
            self._used.popitem(last=False)
        if permit_id in self._used or len(self._used) >= MAX_REMEMBERED_PERMITS:
            raise _refused()
        self._used[permit_id] = expires


def _code(claims: bytes, key: bytes) -> bytes:
    return hmac.digest(key, _PREFIX + claims, hashlib.sha256)


def _refused() -> WeftError:
    return WeftError(
        Reason.PERMIT_INVALID, "the permit was refused; operations go through the registry, not to a runner directly"
    )
