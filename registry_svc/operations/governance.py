"""The governance gate: admits new operations by their tokens, and rejects tokens that a restored database forgot."""

import json
import math
import os
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

from typing_extensions import override

from registry_svc.config import GovernanceConfig, GovernanceMode
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
from weft.api.operations.v1 import operation_pb2
from weft.api.operations.v1.operation_service_pb2 import GetGovernanceResponse
from weft.kernel.clock import Clock
from weft.kernel.errors import invalid_field
from weft.kernel.log import get_logger
from weft.kernel.timestamps import duration_of
from weft.signing.strict_json import MalformedToken

if TYPE_CHECKING:
    from registry_svc.operations.token_verifier import TokenVerifier

log = get_logger("weft.registry")

MAX_FILE_BYTES = 4096
MISSING = "there is no authorization"
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_MICROSECOND = timedelta(microseconds=1)


@dataclass(frozen=True, slots=True, kw_only=True)
class GovernanceMarks:
    """What a gatekeeper needs to know about earlier runs of the registry."""

    audience: str
    """The registry's id, random and permanent."""
    newest_issued_at: datetime | None = None
    """The highest `Admission.mark` ever saved; None: none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Admission:
    """The facts of a valid authorization."""

    signers: tuple[str, ...] = ()
    """Unique key ids of the signers."""
    nonce: str = ""
    """A value that must not be used again, at most 128 characters; empty: none. It is saved in the transaction that
    saves the operation, and an operation with a known nonce is rejected."""
    nonce_kept_until: datetime | None = None
    """Until when the nonce must be remembered, UTC; must be set if `nonce` is."""
    issued_at: datetime | None = None
    """When the authorization was issued, UTC, for the audit log."""
    mark: datetime | None = None
    """Raises `GovernanceMarks.newest_issued_at`, which never falls, in the same transaction; None: unchanged."""


class Gatekeeper:
    """Decides whether an operation is allowed. This one admits everything: governance is off.

    Must not block, since it is called on the event loop.
    """

    def __init__(self) -> None:
        self._audience = ""

    def recall(self, marks: GovernanceMarks) -> None:
        """Loads the marks of earlier runs. Called at each start, before anything is admitted."""
        self._audience = marks.audience

    def admit(self, action: operation_pb2.OperationAction, authorization: str, now_utc: datetime) -> Admission:
        """Returns the facts of `authorization` for a validated action. Raises Refused.

        `authorization` has at most MAX_AUTHORIZATION_CHARS, but is otherwise unchecked. The caller has to check that
        the nonce is new.
        """
        del action, authorization, now_utc
        return Admission()

    def describe(self) -> GetGovernanceResponse:
        """Returns the rules, for GetGovernance."""
        return GetGovernanceResponse(mode=GetGovernanceResponse.MODE_OFF, audience=self._audience)


class RollbackGuard:
    """Stores the newest issue times of tokens in a file (the witness), to detect a rollback of the database.

    The file is not synced to disk. A damaged file counts as lost, which makes the gate stricter, never laxer. Without a
    path nothing is stored, and every start rejects tokens from before it.
    """

    def __init__(self, path: Path | None) -> None:
        self._path = path

    def read(self) -> Marks | None:
        """Returns the marks; None if missing or unreadable."""
        if self._path is None:
            return None
        try:
            with self._path.open("rb") as file:
                found: Any = json.loads(file.read(MAX_FILE_BYTES))
            newest, floor = int(found["newest_microseconds"]), float(found["refused_before"])
        except (OSError, ValueError, KeyError, TypeError, OverflowError, RecursionError):
            return None
        if newest < 0 or not math.isfinite(floor):
            return None
        return Marks(newest_microseconds=newest, floor=floor)

    def write(self, marks: Marks) -> None:
        """Replaces the marks. Raises OSError."""
        if self._path is None:
            return
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
    """A gatekeeper that requires tokens. `clock` is only used for the time of the start."""

    def __init__(self, config: GovernanceConfig, verifier: "TokenVerifier", guard: RollbackGuard, clock: Clock) -> None:
        self._config = config
        self._verifier = verifier
        self._guard = guard
        self._clock = clock
        self._quorum = _quorum(config)
        self._lifetime, self._skew = config.token_lifetime_seconds, config.clock_skew_seconds
        self._audience = config.audience or ""
        self._marks: Marks | None = None

    @override
    def recall(self, marks: GovernanceMarks) -> None:
        """See Gatekeeper.recall. Raises INVALID_ARGUMENT if the witness file cannot be written."""
        self._audience = self._config.audience or marks.audience
        stored = None if marks.newest_issued_at is None else _microseconds(marks.newest_issued_at)
        witnessed = self._guard.read()
        started_at = self._clock.utc_now().timestamp()
        self._marks = marks_at_start(stored, witnessed, started_at=started_at, skew=self._skew)
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
    def admit(self, action: operation_pb2.OperationAction, authorization: str, now_utc: datetime) -> Admission:
        if self._marks is None or not self._audience:
            raise Refused("the gate has no marks of earlier runs")
        if not authorization.strip():
            raise Refused(MISSING)
        try:
            verified = self._verifier.verify(action, authorization, self._audience)
        except MalformedToken as error:
            raise Refused(f"the authorization {error}") from error
        signers = agreed(verified.signers, self._quorum)
        # A shared key does not prove that a signer agreed.
        proven = signers if self._config.mode is GovernanceMode.SIGNATURES else ()
        fault = (
            fault_in_agreement(verified.signers, self._quorum)
            or fault_in_time(verified, now_utc.timestamp(), lifetime=self._lifetime, skew=self._skew)
            or fault_in_age(verified.issued_at, self._marks, lifetime=self._lifetime, skew=self._skew)
        )
        if fault is not None:
            raise Refused(fault, actors=proven)
        mark = self._raised_mark(self._marks, verified.issued_at, proven)
        return Admission(
            signers=signers,
            nonce=verified.nonce,
            nonce_kept_until=_utc(nonce_kept_until(verified.expires_at, self._skew)),
            issued_at=_utc(verified.issued_at),
            mark=mark,
        )

    @override
    def describe(self) -> GetGovernanceResponse:
        return GetGovernanceResponse(
            mode=self._config.mode.value,  # type: ignore[arg-type]  # same numbers
            required_signers=self._quorum.required,
            signers=sorted(self._quorum.counted),
            audience=self._audience,
            token_lifetime=duration_of(self._lifetime),
            policy_version=self._config.policy_version,
        )

    def _raised_mark(self, marks: Marks, issued_at: float, proven: tuple[str, ...]) -> datetime:
        """Writes the witness before the database: after a crash, old tokens stay rejected. Returns the newest time."""
        raised = marks.raised_to(issued_at)
        try:
            self._guard.write(raised)
        except OSError as error:
            raise Refused(f"the witness of issue times cannot be written: {error.strerror}", actors=proven) from error
        self._marks = raised
        return _EPOCH + raised.newest_microseconds * _MICROSECOND


def build_gate(config: GovernanceConfig, clock: Clock) -> Gatekeeper:
    """Returns the gate for a configuration. Raises INVALID_ARGUMENT if no token could satisfy it."""
    if config.mode is GovernanceMode.OFF:
        return Gatekeeper()
    quorum = _quorum(config)
    if not 1 <= quorum.required <= len(quorum.counted):
        raise invalid_field("required_signers", f"must be 1 to {len(quorum.counted)}, as there are signers not revoked")
    from registry_svc.operations.token_verifier import TokenVerifier  # noqa: PLC0415 - loads joserfc

    return GovernanceGate(config, TokenVerifier(config), RollbackGuard(config.witness_file), clock)


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
