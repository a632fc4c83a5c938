"""The governance gate: admits new operations by their tokens."""

from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING

from typing_extensions import override

from registry_svc.operations.policy.governance import (
    Marks,
    Quorum,
    Refused,
    agreed,
    fault_in_age,
    fault_in_agreement,
    fault_in_time,
    marks_at_start,
    nonce_kept_until,
)
from registry_svc.registry_config import GovernanceConfig, GovernanceMode
from weft.api.operations.v1 import operation_pb2
from weft.api.operations.v1.operation_service_pb2 import GetGovernanceResponse
from weft.kernel.errors.error_tree import invalid_field
from weft.kernel.telemetry.log import get_logger
from weft.kernel.time.clock import Clock
from weft.kernel.time.timestamps import duration_of
from weft.signing.strict_json import MalformedToken

if TYPE_CHECKING:
    from registry_svc.operations.token_verifier import TokenVerifier

log = get_logger("weft.registry")

MISSING = "there is no authorization"
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_MICROSECOND = timedelta(microseconds=1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Admission:
    """The facts of a valid authorization."""

    signers: tuple[str, ...] = ()
    """Unique ids of the signers."""
    nonce: str = ""
    """A value that must not be used again, at most 128 characters; empty: none. It is saved in the transaction that
    saves the operation, and an operation with a known nonce is rejected."""
    nonce_kept_until: datetime | None = None
    """Until when the nonce must be remembered, UTC; must be set if `nonce` is."""
    issued_at: datetime | None = None
    """When the authorization was issued, UTC, for the audit log."""
    mark: datetime | None = None
    """Raises the stored `newest_issued_at`, which never falls, in the same transaction; None: unchanged."""


class Gatekeeper:
    """Decides whether an operation is allowed. This one admits everything: governance is off.

    Must not block, since it is called on the event loop.
    """

    def recall(self, newest_issued_at: datetime | None) -> None:
        """Loads the highest `Admission.mark` of earlier runs; None: none. Called before anything is admitted."""

    def admit(self, action: operation_pb2.OperationAction, authorization: str, now_utc: datetime) -> Admission:
        """Returns the facts of `authorization` for a validated action. Raises Refused.

        `authorization` has at most MAX_AUTHORIZATION_CHARS, but is otherwise unchecked. The caller has to check that
        the nonce is new.
        """
        del action, authorization, now_utc
        return Admission()

    def describe(self) -> GetGovernanceResponse:
        """Returns the rules, for GetGovernance."""
        return GetGovernanceResponse(mode=GetGovernanceResponse.MODE_OFF)


class ClosedGate(Gatekeeper):
    """A gatekeeper that refuses everything, for a configured mode that was removed."""

    @override
    def admit(self, action: operation_pb2.OperationAction, authorization: str, now_utc: datetime) -> Admission:
        raise Refused("the configured mode signatures was removed; set registry.governance.mode to shared_key or off")

    @override
    def describe(self) -> GetGovernanceResponse:
        return GetGovernanceResponse(mode=GetGovernanceResponse.MODE_SIGNATURES)


class GovernanceGate(Gatekeeper):
    """A gatekeeper that requires tokens. `clock` is only used for the time of the start."""

    def __init__(self, config: GovernanceConfig, verifier: "TokenVerifier", clock: Clock) -> None:
        self._verifier = verifier
        self._clock = clock
        self._quorum = _quorum(config)
        self._lifetime, self._skew = config.token_lifetime_seconds, config.clock_skew_seconds
        self._marks: Marks | None = None

    @override
    def recall(self, newest_issued_at: datetime | None) -> None:
        stored = None if newest_issued_at is None else _microseconds(newest_issued_at)
        self._marks = marks_at_start(stored, started_at=self._clock.utc_now().timestamp())

    @override
    def admit(self, action: operation_pb2.OperationAction, authorization: str, now_utc: datetime) -> Admission:
        if self._marks is None:
            raise Refused("the gate has no marks of earlier runs")
        if not authorization.strip():
            raise Refused(MISSING)
        try:
            verified = self._verifier.verify(action, authorization)
        except MalformedToken as error:
            raise Refused(f"the authorization {error}") from error
        fault = (
            fault_in_agreement(verified.signers, self._quorum)
            or fault_in_time(verified, now_utc.timestamp(), skew=self._skew)
            or fault_in_age(verified.issued_at, self._marks, lifetime=self._lifetime, skew=self._skew)
        )
        if fault is not None:
            raise Refused(fault)
        self._marks = self._marks.raised_to(verified.issued_at)
        return Admission(
            signers=agreed(verified.signers, self._quorum),
            nonce=verified.nonce,
            nonce_kept_until=_utc(nonce_kept_until(verified.expires_at, self._skew)),
            issued_at=_utc(verified.issued_at),
            mark=_EPOCH + self._marks.newest_microseconds * _MICROSECOND,
        )

    @override
    def describe(self) -> GetGovernanceResponse:
        return GetGovernanceResponse(
            mode=GetGovernanceResponse.MODE_SHARED_KEY,
            required_signers=self._quorum.required,
            signers=sorted(self._quorum.counted),
            token_lifetime=duration_of(self._lifetime),
        )


def build_gate(config: GovernanceConfig, clock: Clock) -> Gatekeeper:
    """Returns the gate for a configuration. Raises INVALID_ARGUMENT if no token could satisfy it."""
    if config.mode is GovernanceMode.OFF:
        return Gatekeeper()
    if config.mode is GovernanceMode.SIGNATURES:
        return ClosedGate()
    quorum = _quorum(config)
    if not 1 <= quorum.required <= len(quorum.counted):
        raise invalid_field("required_signers", f"must be 1 to {len(quorum.counted)}, as there are signers not revoked")
    from registry_svc.operations.token_verifier import TokenVerifier  # noqa: PLC0415 - loads joserfc

    return GovernanceGate(config, TokenVerifier(config), clock)


def _quorum(config: GovernanceConfig) -> Quorum:
    return Quorum(
        counted=frozenset(signer.id for signer in config.signers if not signer.revoked),
        revoked=frozenset(signer.id for signer in config.signers if signer.revoked),
        required=config.required_signers,
    )


def _utc(seconds: float) -> datetime:
    return datetime.fromtimestamp(seconds, UTC)


def _microseconds(moment: datetime) -> int:
    return (moment - _EPOCH) // _MICROSECOND
