"""Verdicts and findings of the suites that `weft runner conformance` runs."""

from dataclasses import dataclass
from enum import StrEnum


class Verdict(StrEnum):
    """The verdict of a check."""

    HONOURED = "honoured"
    BROKEN = "broken"
    NOT_CHECKED = "not checked"


class BrokenPromiseError(Exception):
    """The subject of a check breaks a promise; the message says what it did instead."""


class NotCheckedError(Exception):
    """The check does not apply here; the message says why."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """The result of one check."""

    check: str
    promise: str
    verdict: Verdict
    detail: str
    seconds: float


def require(honoured: bool, otherwise: str) -> None:
    """Raises BrokenPromiseError with `otherwise` unless `honoured`."""
    if not honoured:
        raise BrokenPromiseError(otherwise)
