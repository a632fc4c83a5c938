"""Who may have operations done: the port that every new operation passes, and the gate that is open."""

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
    """What a gatekeeper must know of earlier lives of the registry."""

    audience: str
    """The registry's own id: made once, at random, and kept."""
    newest_issued_at: datetime | None = None
    """The highest `Admission.mark` that was ever saved; None: none was."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Admission:
    """What was found good about an authorization."""

    signers: tuple[str, ...] = ()
    """Who agreed, by key id, each once."""
    nonce: str = ""
    """What must never be used again; empty: nothing. It is saved in the transaction that saves the operation, and an
    operation whose nonce is there already is refused. At most 128 characters."""
    nonce_kept_until: datetime | None = None
    """Until when the nonce has to be remembered, UTC; must be set where `nonce` is."""
    issued_at: datetime | None = None
    """When the authorization was issued, UTC; for the audit log."""
    mark: datetime | None = None
    """Raises `GovernanceMarks.newest_issued_at` to this in the same transaction; None: leaves it. It never falls."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GovernanceRules:
    """What an operation needs to be accepted, for those who sign."""

    mode: GovernanceMode
    required_signers: int = 0
    signers: tuple[str, ...] = ()
    """Key ids of those whose agreement counts."""
    audience: str = ""
    token_lifetime_seconds: float = 0.0
    policy_version: str = ""


class Refused(Exception):  # noqa: N818 - an outcome, which is no error of the gatekeeper
    """An authorization is not good. `why` is for the audit log alone: callers hear only that it was refused."""

    def __init__(self, why: str, *, actors: tuple[str, ...] = ()) -> None:
        super().__init__(why)
        self.why = why
        """One short sentence without any part of the authorization that could be used again."""
        self.actors = actors
        """Whose agreement was proven all the same, by key id."""


class Gatekeeper(Protocol):
    """Judges whether an operation may be done. Must not block: it is asked on the event loop."""

    def recall(self, marks: GovernanceMarks) -> None:
        """Take note of earlier lives; called at each start, before anything is admitted."""
        ...

    def admit(
        self, action_bytes: bytes, action: operation_pb2.OperationAction, authorization: str, now_utc: datetime
    ) -> Admission:
        """What is good about `authorization` for this action; raises Refused.

        `action_bytes` are the deterministic serialization of `action`, which has been checked. `authorization` is at
        most MAX_AUTHORIZATION_CHARS long and otherwise unchecked. Whether the nonce is fresh is not judged here.
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
    """An authorization that is real and is for the action; whether it is good now and enough is judged after it."""

    signers: tuple[str, ...]
    """Who is named as agreeing, each once; of those that count, only whom the proof is for."""
    nonce: str
    validity: Validity


class Verifier(Protocol):
    """Checks one kind of authorization."""

    def verify(self, action: operation_pb2.OperationAction, authorization: str, audience: str) -> Verified:
        """The facts. Raises Refused, and MalformedToken for what is not in form."""
        ...
