"""The governance gate: admits new operations by their tokens, and refuses tokens that a restored database forgot."""

import json
import math
import os
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, Protocol

from typing_extensions import override

from registry_svc.config import GovernanceConfig, GovernanceMode
from registry_svc.operations.governance import (
    Admission,
    Gatekeeper,
    GovernanceMarks,
    GovernanceRules,
    OpenGate,
    Refused,
    Verified,
    Verifier,
)
from registry_svc.operations.policy.governance import (
    Marks,
    Quorum,
    TimeLimits,
    agreed,
    fault_in_age,
    fault_in_agreement,
    fault_in_time,
    marks_at_start,
    nonce_kept_until,
)
from weft.api.operations.v1 import operation_pb2
from weft.kernel.clock import Clock
from weft.kernel.errors import invalid_field
from weft.kernel.log import get_logger
from weft.signing.strict_json import MalformedToken

log = get_logger("weft.registry")

MAX_FILE_BYTES = 4096
MISSING = "there is no authorization"
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_MICROSECOND = timedelta(microseconds=1)


class RollbackGuard(Protocol):
    """Keeps the marks of issue times across restarts, apart from the database, to detect a rollback of it."""

    def read(self) -> Marks | None:
        """Return the marks; None: missing or unreadable."""
        ...

    def write(self, marks: Marks) -> None:
        """Keep `marks` instead. Raises OSError."""
        ...


class NoRollbackGuard(RollbackGuard):
    """Keeps nothing, so that every start refuses tokens from before it."""

    @override
    def read(self) -> None:
        pass

    @override
    def write(self, marks: Marks) -> None:
        pass


class RollbackGuardFile(RollbackGuard):
    """See RollbackGuard. It is written without waiting for the disk.

    A file that a power cut spoilt counts as lost, and a lost one makes the gate stricter, never laxer.
    """

    def __init__(self, path: Path) -> None:
        self._path = path

    @override
    def read(self) -> Marks | None:
        try:
            with self._path.open("rb") as file:
                found: Any = json.loads(file.read(MAX_FILE_BYTES))
            newest, floor = int(found["newest_microseconds"]), float(found["refused_before"])
        except (OSError, ValueError, KeyError, TypeError, OverflowError, RecursionError):
            return None
        if newest < 0 or not math.isfinite(floor):
            return None
        return Marks(newest_microseconds=newest, floor=floor)

    @override
    def write(self, marks: Marks) -> None:
        fresh = self._path.with_name(f"{self._path.name}.new")
        text = json.dumps({"newest_microseconds": marks.newest_microseconds, "refused_before": marks.floor})
        try:
            with os.fdopen(os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w") as file:
                file.write(text)
            fresh.replace(self._path)
        except OSError:
            with suppress(OSError):
                fresh.unlink()
            raise


class GovernanceGate(Gatekeeper):
    """A gatekeeper that requires tokens. `clock` provides the time of the start only."""

    def __init__(self, config: GovernanceConfig, verifier: Verifier, guard: RollbackGuard, clock: Clock) -> None:
        self._config = config
        self._verifier = verifier
        self._guard = guard
        self._clock = clock
        self._quorum = _quorum(config)
        self._limits = TimeLimits(lifetime=config.token_lifetime_seconds, skew=config.clock_skew_seconds)
        self._audience = config.audience or ""
        self._marks: Marks | None = None

    def recall(self, marks: GovernanceMarks) -> None:
        """See Gatekeeper.recall. Raises INVALID_ARGUMENT when the witness cannot be written."""
        self._audience = self._config.audience or marks.audience
        stored = None if marks.newest_issued_at is None else _microseconds(marks.newest_issued_at)
        witnessed = self._guard.read()
        started_at = self._clock.utc_now().timestamp()
        self._marks = marks_at_start(stored, witnessed, started_at=started_at, skew=self._limits.skew)
        try:
            self._guard.write(self._marks)
        except OSError as error:
            raise invalid_field(
                "registry.governance", f"needs to write the witness of issue times: {error.strerror}"
            ) from error
        is_new = stored is None and witnessed is None
        if not is_new and self._marks.floor > (0.0 if witnessed is None else witnessed.floor):
            log.warning(
                "the database may not know every token that was used; older ones are refused, sign again",
                witness="lost" if witnessed is None else "knows more",
                refused_before=_utc(self._marks.floor).isoformat(),
            )

    @override
    def admit(
        self, action_bytes: bytes, action: operation_pb2.OperationAction, authorization: str, now_utc: datetime
    ) -> Admission:
        del action_bytes  # messages are compared
        if self._marks is None or not self._audience:
            raise Refused("the gate has no marks of earlier runs")
        if not authorization.strip():
            raise Refused(MISSING)
        try:
            verified = self._verifier.verify(action, authorization, self._audience)
        except MalformedToken as error:
            raise Refused(f"the authorization {error}") from error
        signers = agreed(verified.signers, self._quorum)
        # A shared key proves no signer's agreement.
        proven = signers if self._config.mode is GovernanceMode.SIGNATURES else ()
        fault = self._fault(verified, self._marks, now_utc.timestamp())
        if fault is not None:
            raise Refused(fault, actors=proven)
        mark = self._raised_mark(self._marks, verified.validity.issued_at, proven)
        return Admission(
            signers=signers,
            nonce=verified.nonce,
            nonce_kept_until=_utc(nonce_kept_until(verified.validity.expires_at, self._limits.skew)),
            issued_at=_utc(verified.validity.issued_at),
            mark=mark,
        )

    @override
    def describe(self) -> GovernanceRules:
        return GovernanceRules(
            mode=self._config.mode,
            required_signers=self._quorum.required,
            signers=tuple(sorted(self._quorum.counted)),
            audience=self._audience,
            token_lifetime_seconds=self._limits.lifetime,
            policy_version=self._config.policy_version,
        )

    def _fault(self, verified: Verified, marks: Marks, now: float) -> str | None:
        limits, validity = self._limits, verified.validity
        return (
            fault_in_agreement(verified.signers, self._quorum)
            or fault_in_time(validity, now, limits)
            or fault_in_age(validity.issued_at, marks, lifetime=limits.lifetime, skew=limits.skew)
        )

    def _raised_mark(self, marks: Marks, issued_at: float, proven: tuple[str, ...]) -> datetime:
        """The witness knows a token before the database does: after a crash between the two, old ones are refused."""
        raised = marks.raised_to(issued_at)
        try:
            self._guard.write(raised)
        except OSError as error:
            raise Refused(f"the witness of issue times cannot be written: {error.strerror}", actors=proven) from error
        self._marks = raised
        return _EPOCH + raised.newest_microseconds * _MICROSECOND


def build_gate(config: GovernanceConfig, clock: Clock) -> Gatekeeper:
    """Return the gate for a configuration. Raises INVALID_ARGUMENT for one that no token could satisfy."""
    if config.mode is GovernanceMode.OFF:
        return OpenGate()
    quorum = _quorum(config)
    if not 1 <= quorum.required <= len(quorum.counted):
        raise invalid_field("required_signers", f"must be 1 to {len(quorum.counted)}, as there are signers not revoked")
    guard = NoRollbackGuard() if config.witness_file is None else RollbackGuardFile(config.witness_file)
    return GovernanceGate(config, _verifier(config), guard, clock)


def _verifier(config: GovernanceConfig) -> Verifier:
    # joserfc and its cryptography are loaded only where governance is on.
    from registry_svc.operations.token_verifiers import SharedKeyVerifier, SignatureVerifier  # noqa: PLC0415 - see above

    if config.mode is GovernanceMode.SHARED_KEY:
        return SharedKeyVerifier(config.shared_key, lifetime_seconds=config.token_lifetime_seconds)
    return SignatureVerifier(config.signers, policy_version=config.policy_version)


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
