"""Permits of the registry: each is good once, for one action on one model of one life of one runner."""

import hashlib
import hmac
from collections.abc import Callable

import pytest

from weft.api.runner.v1 import permit_pb2
from weft.dispatch.tickets import (
    MAX_REMEMBERED_PERMITS,
    PERMIT_LIFETIME_SECONDS,
    Action,
    PermitGate,
    PermitTarget,
    make_permit,
    sign,
)
from weft.kernel.errors.error_tree import WeftError
from weft.kernel.errors.reasons import Reason

KEY = b"k" * 32
NOW = 1_800_000_000.0


def gate(runner: str = "r1", incarnation: str = "life-1", key: bytes | None = KEY) -> PermitGate:
    made = PermitGate(runner=runner, incarnation=incarnation)
    if key is not None:
        made.use_key(key)
    return made


def permit(now: float = NOW) -> permit_pb2.OperationPermit:
    target = PermitTarget(runner="r1", incarnation="life-1", key=KEY)
    return make_permit(target, Action.LOAD, model="m", operation_id="op-1", now=now)


def refusal(call: Callable[[], object]) -> str:
    with pytest.raises(WeftError) as refused:
        call()
    assert refused.value.reason is Reason.PERMIT_INVALID
    return refused.value.message


def test_permit_is_single_use() -> None:
    one, checks = permit(), gate()
    assert checks.admit(one, Action.LOAD, model="m", now=NOW) == "op-1"
    for later in (NOW, NOW + PERMIT_LIFETIME_SECONDS - 1, NOW + PERMIT_LIFETIME_SECONDS, NOW + 86_400):
        refusal(lambda later=later: checks.admit(one, Action.LOAD, model="m", now=later))  # type: ignore[misc]
    assert checks.admit(permit(), Action.LOAD, model="m", now=NOW) == "op-1"


@pytest.mark.parametrize(
    ("checks", "action", "model", "now"),
    [
        (gate(runner="r2"), Action.LOAD, "m", NOW),
        (gate(incarnation="life-2"), Action.LOAD, "m", NOW),
        (gate(key=b"o" * 32), Action.LOAD, "m", NOW),
        (gate(key=None), Action.LOAD, "m", NOW),
        (gate(), Action.UNLOAD, "m", NOW),
        (gate(), Action.FLUSH, "m", NOW),
        (gate(), Action.YIELD, "m", NOW),
        (gate(), Action.LOAD, "m2", NOW),
        (gate(), Action.LOAD, "", NOW),
        (gate(), Action.LOAD, "m", NOW + PERMIT_LIFETIME_SECONDS),
    ],
    ids=["runner", "life", "key", "no-key", "unload", "flush", "yield", "model", "no-model", "expired"],
)
def test_permit_for_another_use_is_refused_without_a_cause(
    checks: PermitGate, action: Action, model: str, now: float
) -> None:
    words = refusal(lambda: checks.admit(permit(), action, model=model, now=now))
    assert words == refusal(lambda: gate().admit(permit_pb2.OperationPermit(), Action.LOAD, model="m", now=NOW))


def test_modified_permit_is_refused_and_not_consumed() -> None:
    one, checks = permit(), gate()
    for position in range(len(one.claims)):
        changed = bytearray(one.claims)
        changed[position] ^= 1
        bent = permit_pb2.OperationPermit(claims=bytes(changed), mac=one.mac)
        refusal(lambda bent=bent: checks.admit(bent, Action.LOAD, model="m", now=NOW))  # type: ignore[misc]
    for mac in (b"", one.mac[:-1], one.mac + b"\0"):
        bent = permit_pb2.OperationPermit(claims=one.claims, mac=mac)
        refusal(lambda bent=bent: checks.admit(bent, Action.LOAD, model="m", now=NOW))  # type: ignore[misc]
    checks.admit(one, Action.LOAD, model="m", now=NOW)


def test_ticket_signed_with_the_same_key_is_not_a_permit() -> None:
    claims = permit().claims
    for mac in (sign(claims, KEY), hmac.digest(KEY, b"weft" + claims, hashlib.sha256)):
        signed_as_ticket = permit_pb2.OperationPermit(claims=claims, mac=mac)
        refusal(lambda each=signed_as_ticket: gate().admit(each, Action.LOAD, model="m", now=NOW))  # type: ignore[misc]


def test_flood_is_refused_and_replay_memory_is_bounded_and_expires() -> None:
    checks = gate()
    for _ in range(MAX_REMEMBERED_PERMITS):
        checks.admit(permit(), Action.LOAD, model="m", now=NOW)
    refusal(lambda: checks.admit(permit(), Action.LOAD, model="m", now=NOW))
    later = NOW + PERMIT_LIFETIME_SECONDS
    assert checks.admit(permit(later), Action.LOAD, model="m", now=later) == "op-1"
