"""Whether what was proven about a token is enough: who agreed, and when it is good. A fault is a value, in words."""

from collections.abc import Collection
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Roll:
    """Who may agree, and how many must."""

    counted: frozenset[str]
    """Key ids of those whose agreement counts."""
    revoked: frozenset[str]
    """Key ids of those whose agreement counts no longer."""
    required: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Validity:
    """When a token is good, by the clock of whoever made it. Seconds since the epoch."""

    issued_at: float
    not_before: float
    expires_at: float


@dataclass(frozen=True, slots=True, kw_only=True)
class TimeLimits:
    """How long tokens may live, and how far clocks may be apart, in seconds."""

    lifetime: float
    skew: float


def agreed(named: Collection[str], roll: Roll) -> tuple[str, ...]:
    """Those of `named` that count, each once, in order."""
    return tuple(sorted(set(named) & roll.counted))


def fault_in_agreement(named: Collection[str], roll: Roll) -> str | None:
    """Why those who are `named` are not enough; None: they are. Who is unknown or revoked does not count."""
    counted = agreed(named, roll)
    if len(counted) >= roll.required:
        return None
    revoked = sorted(set(named) & roll.revoked)
    unknown = len(set(named)) - len(counted) - len(revoked)
    parts = [f"{len(counted)} of {roll.required} signers agreed"]
    if revoked:
        parts.append(f"revoked: {', '.join(revoked)}")
    if unknown:
        parts.append(f"unknown: {unknown}")
    return "; ".join(parts)


def fault_in_time(validity: Validity, now: float, limits: TimeLimits) -> str | None:
    """Why a token is not good at `now`; None: it is.

    Clocks of signers may be ahead by the skew. To the expiry nothing is added: a clock that is behind shortens a token.
    """
    if validity.expires_at <= max(validity.not_before, validity.issued_at):
        return "it expires before it is good"
    if validity.expires_at - validity.issued_at > limits.lifetime:
        return f"it is good for longer than {limits.lifetime:g} s"
    if validity.issued_at > now + limits.skew:
        return "it was issued in the future"
    if validity.not_before > now + limits.skew:
        return "it is not good yet"
    if now >= validity.expires_at:
        return "it expired"
    return None
