"""Everything about operations that an operator can set."""

import math
from dataclasses import dataclass

from weft.kernel.errors import invalid_field


@dataclass(frozen=True, slots=True, kw_only=True)
class OperationSettings:
    """Settings with their defaults. A value that makes no sense raises INVALID_ARGUMENT naming the field."""

    max_running: int = 32
    """Operations that are carried out at once; more wait."""
    max_unfinished: int = 1_000
    """Operations that may wait or run; more are refused."""
    keep_seconds: float = 604_800.0
    """How long an operation is kept once it has ended."""
    timeout_seconds: float = 3_600.0
    """Longest time that one operation may take; then it is cancelled, and failed."""
    max_audit_entries: int = 1_000_000
    """Entries of the audit log; at the limit operations are refused."""
    audit_head_interval_seconds: float = 3_600.0
    """How often the end of the audit log is written to the ordinary log."""

    def __post_init__(self) -> None:
        for name in self.__dataclass_fields__:
            value = getattr(self, name)
            if not math.isfinite(value) or value <= 0:
                raise invalid_field(name, "must be a number greater than zero")
