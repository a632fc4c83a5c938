"""What is kept of answers, and for how long."""

from dataclasses import dataclass

MEBIBYTE = 1024 * 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class ResponseLimits:
    """Every bound of the store of answers."""

    keep_seconds: float = 30 * 86_400.0
    """How long an answer is kept."""
    max_bytes: int = 16 * MEBIBYTE
    """Of one answer with its input."""
    max_chain_bytes: int = 48 * MEBIBYTE
    """Of one conversation; it travels in one message."""
    max_per_tenant: int = 100_000
    """Answers that one tenant may keep."""
    max_tenant_bytes: int = 4 * 1024 * MEBIBYTE
    """Of all answers that one tenant keeps."""
    max_total_bytes: int = 16 * 1024 * MEBIBYTE
    """Of all answers of all tenants: the disk has other uses."""
    sweep_interval_seconds: float = 300.0
    """How often those that are over are forgotten, and what tenants keep is counted anew."""
