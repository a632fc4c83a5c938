"""What the checks of `weft doctor` find."""

from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum

from weft.kernel.errors import WeftError


class Verdict(StrEnum):
    """The result of a check."""

    OK = "ok"
    WARNING = "warning"
    FAILED = "failed"


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One check and what to do about it."""

    check: str
    verdict: Verdict
    detail: str
    remedy: str = ""


def attempt(check: str, look: Callable[[], str], remedy: str) -> Finding:
    """Returns what a check found: its text, or the error that it raised."""
    try:
        return Finding(check=check, verdict=Verdict.OK, detail=look())
    except WeftError as error:
        return failed(check, error.message, remedy)


def failed(check: str, detail: str, remedy: str) -> Finding:
    """Returns the finding of a check that failed."""
    return Finding(check=check, verdict=Verdict.FAILED, detail=detail, remedy=remedy)
