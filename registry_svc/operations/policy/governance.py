"""Decides whether an authentic token is sufficient: signers, validity, and age. Faults are returned as text."""

from collections.abc import Collection
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Quorum:
    """The signers that count, and how many must agree."""

    counted: frozenset[str]
    """Key ids of the signers whose agreement counts."""
    revoked: frozenset[str]
    """Key ids of revoked signers."""
    required: int


class Refused(Exception):  # noqa: N818 - an outcome, not an error
    """An authorization is not valid. `why` is only for the audit log; callers only learn that it was refused."""

    def __init__(self, why: str) -> None:
        super().__init__(why)
        self.why = why
        """A short sentence without any reusable part of the authorization."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Verified:
    """An authentic authorization for the action, not yet checked for validity and sufficiency."""

    signers: tuple[str, ...]
    """Unique ids of the named signers."""
    nonce: str
    issued_at: float
    """By the clock of its maker, in seconds since the epoch."""
    expires_at: float


def agreed(named: Collection[str], quorum: Quorum) -> tuple[str, ...]:
    """Returns the signers in `named` that count, unique and sorted."""
    return tuple(sorted(set(named) & quorum.counted))


def fault_in_agreement(named: Collection[str], quorum: Quorum) -> str | None:
    """Returns why the `named` signers are not sufficient; None if they are. Unknown and revoked ones do not count."""
    counted = agreed(named, quorum)
    if len(counted) >= quorum.required:
        return None
    revoked = sorted(set(named) & quorum.revoked)
    unknown = len(set(named)) - len(counted) - len(revoked)
    parts = [f"{len(counted)} of {quorum.required} signers agreed"]
    if revoked:
        parts.append(f"revoked: {', '.join(revoked)}")
    if unknown:
        parts.append(f"unknown: {unknown}")
    return "; ".join(parts)


def fault_in_time(token: Verified, now: float, *, skew: float) -> str | None:
    """Returns why a token is not valid at `now`; None if it is.

    Signers' clocks may be ahead by the skew. The expiry gets no tolerance: a clock that is behind shortens it.
    """
    if token.issued_at > now + skew:
        return "it was issued in the future"
    if now >= token.expires_at:
        return "it expired"
    return None


MICROSECONDS = 1_000_000
CLOCK_SET_BACK_SECONDS = 86_400.0
"""A clock that is set back by at most this does not make a used nonce valid again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Marks:
    """Marks of issue times."""

    newest_microseconds: int = 0
    """The newest admitted issue time since the epoch; 0: none. Every token, also an older one, raises it by at least
    one, so that it also counts tokens, and a copy of a database that lacks any is detected."""
    floor: float = 0.0
    """Tokens issued before this, in seconds since the epoch, are rejected."""

    def raised_to(self, issued_at: float) -> "Marks":
        """Returns the marks after admitting a token issued at `issued_at`, in seconds since the epoch."""
        newest = max(self.newest_microseconds + 1, round(issued_at * MICROSECONDS))
        return Marks(newest_microseconds=newest, floor=self.floor)


def marks_at_start(stored: int | None, *, started_at: float) -> Marks:
    """Returns the initial marks: `stored` is the newest mark of the database.

    Tokens from before the start are rejected: the database may be a restored copy that lacks their nonces.
    """
    return Marks(newest_microseconds=stored or 0, floor=float(int(started_at)))


def fault_in_age(issued_at: float, marks: Marks, *, lifetime: float, skew: float) -> str | None:
    """Returns why a token is too old for the marks; None if it is not."""
    if issued_at < marks.floor:
        return "it was issued before the registry started"
    if issued_at < marks.newest_microseconds / MICROSECONDS - lifetime - 2 * skew:
        return "it was issued long before the newest token"
    return None


def nonce_kept_until(expires_at: float, skew: float) -> float:
    """Returns until when the nonce of a token must be remembered, in seconds since the epoch."""
    return expires_at + 2 * skew + CLOCK_SET_BACK_SECONDS
