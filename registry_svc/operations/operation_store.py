"""The port through which operations, the audit log and spent nonces outlive the registry."""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Protocol

from registry_svc.operations.governance import GovernanceMarks
from registry_svc.operations.policy.audit import AuditDraft, AuditEntry, AuditHead
from registry_svc.operations.policy.lifecycle import GovernedOperation


@dataclass(frozen=True, slots=True, kw_only=True)
class SpentNonce:
    """What an authorization may be used for once."""

    nonce: str
    kept_until: datetime
    """Until when it has to be remembered, UTC."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NewOperation:
    """Everything that one accepted operation leaves on disk."""

    operation: GovernedOperation
    """Its `number` is assigned by the store."""
    audit: tuple[AuditDraft, ...]
    nonce: SpentNonce | None = None
    mark: datetime | None = None
    """Raises the mark of issue times; None: leaves it."""


@dataclass(frozen=True, slots=True)
class Saved:
    """It is on disk."""

    operation: GovernedOperation
    head: AuditHead


@dataclass(frozen=True, slots=True)
class RequestKnown:
    """Nothing was written: an earlier operation has this request id."""

    earlier: GovernedOperation


@dataclass(frozen=True, slots=True)
class NonceUsed:
    """Nothing was written: the nonce was used before."""


class OperationStore(Protocol):
    """Where operations and their audit log are kept, beside the tables of `Store`.

    Every write is one transaction that is on disk when the call returns. All methods raise SERVICE_UNAVAILABLE when
    the database fails; then nothing of the write has happened. Audit entries are numbered and chained inside the
    writing transaction.
    """

    async def load_marks(self) -> GovernanceMarks:
        """What a gatekeeper must know of earlier lives; the audience is made at the first call."""
        ...

    async def load_unfinished(self) -> list[GovernedOperation]:
        """Operations that have not ended, in order of acceptance."""
        ...

    async def get(self, operation_id: str) -> GovernedOperation | None:
        """One operation."""
        ...

    async def of_request(self, request_id: str) -> GovernedOperation | None:
        """The operation that a request created."""
        ...

    async def page(
        self, *, before_number: int | None, size: int, unfinished_only: bool = False
    ) -> list[GovernedOperation]:
        """At most `size` operations, newest first; `before_number`: only those accepted before that one."""
        ...

    async def save_new(self, new: NewOperation) -> Saved | RequestKnown | NonceUsed:
        """Keep an operation with its audit entries, its nonce and its mark: all of it, or nothing."""
        ...

    async def update(self, operation: GovernedOperation, audit: Sequence[AuditDraft]) -> AuditHead:
        """Put `operation` in place of its earlier form; raises NOT_FOUND when it was never saved.

        When it is so already nothing is written, so that a call whose answer was lost may be repeated.
        """
        ...

    async def append_audit(self, audit: Sequence[AuditDraft]) -> AuditHead:
        """Write entries that belong to no operation."""
        ...

    async def page_audit(self, *, after_sequence: int, size: int) -> list[AuditEntry]:
        """At most `size` entries after that one, oldest first."""
        ...

    async def audit_head(self) -> AuditHead:
        """The end of the log."""
        ...

    async def delete_ended_before(self, moment: datetime) -> int:
        """Forget operations that ended before `moment`; how many. Those that have not ended stay for ever."""
        ...

    async def purge_nonces(self, moment: datetime) -> int:
        """Forget nonces that need not be remembered at `moment` any more, nor at the time of the mark; how many."""
        ...
