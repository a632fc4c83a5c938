"""Governance of operations: the port that every new operation passes, and its implementation when governance is off."""

from dataclasses import dataclass
from datetime import datetime
from typing import Protocol

from typing_extensions import override

from registry_svc.config import GovernanceMode
from registry_svc.operations.policy.governance import (
    Validity,
)
from weft.api.operations.v1 import operation_pb2


@dataclass(frozen=True, slots=True, kw_only=True)
class GovernanceMarks:
    """What a gatekeeper must know of earlier runs of the registry."""

    audience: str
    """The registry's own id: made once, at random, and kept."""
    newest_issued_at: datetime | None = None
    """The highest `Admission.mark` ever saved; None: none was."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Admission:
    """The facts of a valid authorization."""

    signers: tuple[str, ...] = ()
    """Key ids of the signers, each once."""
    nonce: str = ""
    """A value that must never be used again; empty: none. It is saved in the transaction that saves the operation, and
    an operation whose nonce is known is refused. At most 128 characters."""
    nonce_kept_until: datetime | None = None
    """Until when the nonce has to be remembered, UTC; must be set where `nonce` is."""
    issued_at: datetime | None = None
    """When the authorization was issued, UTC; for the audit log."""
    mark: datetime | None = None
    """Raises `GovernanceMarks.newest_issued_at` to this in the same transaction; None: leaves it. It never falls."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GovernanceRules:
    """What an operation needs to be accepted, for signers."""

    mode: GovernanceMode
    required_signers: int = 0
    signers: tuple[str, ...] = ()
    """Key ids of the signers whose agreement counts."""
    audience: str = ""
    token_lifetime_seconds: float = 0.0
    policy_version: str = ""


class Refused(Exception):  # noqa: N818 - an outcome, which is no error of the gatekeeper
    """An authorization is not valid. `why` is for the audit log only: callers learn only that it was refused."""

    def __init__(self, why: str, *, actors: tuple[str, ...] = ()) -> None:
        super().__init__(why)
        self.why = why
        """One short sentence without any part of the authorization that could be used again."""
        self.actors = actors
        """Key ids of the signers whose agreement was proven nevertheless."""


class Gatekeeper(Protocol):
    """Decides whether an operation may be carried out. Must not block: it is called on the event loop."""

    def recall(self, marks: GovernanceMarks) -> None:
        """Load the marks of earlier runs; called at each start, before anything is admitted."""
        ...

    def admit(
        self, action_bytes: bytes, action: operation_pb2.OperationAction, authorization: str, now_utc: datetime
    ) -> Admission:
        """Return the facts of `authorization` for this action; raises Refused.

        `action_bytes` are the deterministic serialization of `action`, which has been validated. `authorization` is at
        most MAX_AUTHORIZATION_CHARS long and otherwise unchecked. Whether the nonce is fresh is not decided here.
        """
        ...

    def describe(self) -> GovernanceRules:
        """The rules, for GetGovernance."""
        ...


class OpenGate(Gatekeeper):
    """Admits everything: governance is off."""

    def __init__(self) -> None:
        self._audience = ""

    @override
    def recall(self, marks: GovernanceMarks) -> None:
        self._audience = marks.audience

    @override
    def admit(
        self, action_bytes: bytes, action: operation_pb2.OperationAction, authorization: str, now_utc: datetime
    ) -> Admission:
        del action_bytes, action, authorization, now_utc
        return Admission()

    @override
    def describe(self) -> GovernanceRules:
        return GovernanceRules(mode=GovernanceMode.OFF, audience=self._audience)


@dataclass(frozen=True, slots=True, kw_only=True)
class Verified:
    """An authentic authorization for the action; whether it is valid now and sufficient is decided afterwards."""

    signers: tuple[str, ...]
    """Key ids of the signers it names, each once; of those that count, only the proven ones."""
    nonce: str
    validity: Validity


class Verifier(Protocol):
    """Checks one kind of authorization."""

    def verify(self, action: operation_pb2.OperationAction, authorization: str, audience: str) -> Verified:
        """Return the facts. Raises Refused, and MalformedToken for a malformed token."""
        ...
