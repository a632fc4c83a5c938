"""How a check of a runner goes: honoured, not honoured, or not checked and why."""

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from enum import StrEnum

from weft_testing.conformance.runner.subject import RunnerUnderTest


class Verdict(StrEnum):
    """How a check went."""

    HONOURED = "honoured"
    BROKEN = "broken"
    NOT_CHECKED = "not checked"


class BrokenPromiseError(Exception):
    """The runner does not do what every runner must; the message says what it did instead."""


class NotCheckedError(Exception):
    """The check cannot be made here; the message says why."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """One promise of a runner."""

    name: str
    promise: str
    """What a runner that honours it does, in a sentence."""
    run: Callable[[RunnerUnderTest], Awaitable[str]]
    """Makes the check and returns what it saw. Raises BrokenPromiseError or NotCheckedError."""
    unloads: bool = False
    """Whether it unloads the model."""
    chats: bool = False
    """Whether the model must be one that chats."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """How one check went."""

    check: str
    promise: str
    verdict: Verdict
    detail: str
    seconds: float


def require(honoured: bool, otherwise: str) -> None:
    """Raise BrokenPromiseError with `otherwise` unless `honoured`."""
    if not honoured:
        raise BrokenPromiseError(otherwise)
