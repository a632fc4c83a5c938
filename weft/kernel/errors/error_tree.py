"""The error tree. Every failure that crosses a boundary is one of these, with a reason from `reasons`.

    WeftError           a reason, a message for people, and metadata for programs
    └── FieldError      an invalid field of the caller's request

Outcomes that are part of the job (a queued request, a refused lease) are values, not errors.
"""

from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TypeVar

from weft.kernel.errors.reasons import Reason, ReasonTraits, traits

T = TypeVar("T")

PROMPT_TOKENS, COMPLETION_TOKENS, PROMPT_ESTIMATED = "prompt_tokens", "completion_tokens", "prompt_estimated"
"""Metadata keys with the token usage of an answer that was cut short."""
UNSENT = "unsent"
"""Metadata key, "true" if the runner has sent nothing of the request, although its reason leaves that open."""
LASTING = "lasting"
"""Metadata key, "true" if the engine would fail in the same way again: another format, a refused key, a wrong URL."""
ENGINE_CAUSE = "engine_cause"
"""Metadata key of errors whose message quotes an engine: the cause in weft's own words; see `log_message`."""
MAX_RETRY_AFTER_SECONDS = 3600
"""Longest wait that an engine, a provider or a joined machine can ask for."""
LACKED_ROUTER = "lacked_router"
"""Metadata key, "true" if the request ended because no router answered."""


class WeftError(Exception):
    """A failure with its reason.

    `message` is one sentence: the cause, then the remedy if there is one; no paths, keys or traces.
    `metadata` names what is concerned (model, runner, limits); all values are strings.
    `retry_after_seconds` is set if waiting helps; surfaces clamp it to 1..60.
    `engine_exit` ("signal SIGKILL") and `engine_log` (last log lines) describe the runner's engine, for the record of
    the attempt. Dispatchers remove them: callers never get them.
    """

    def __init__(
        self,
        reason: Reason,
        message: str,
        *,
        metadata: Mapping[str, str] | None = None,
        retry_after_seconds: float | None = None,
    ) -> None:
        super().__init__(message)
        self.reason = reason
        self.message = message
        self.metadata: dict[str, str] = dict(metadata or {})
        self.retry_after_seconds = retry_after_seconds
        self.engine_exit = ""
        self.engine_log: tuple[str, ...] = ()

    @property
    def log_message(self) -> str:
        """The message for logs, states, traces and records: without an engine's words, which may quote a prompt."""
        return self.metadata.get(ENGINE_CAUSE, self.message)

    @property
    def traits(self) -> ReasonTraits:
        """What the reason means on each surface."""
        return traits(self.reason)

    def __str__(self) -> str:
        return f"{self.reason.name}: {self.log_message}"


class FieldError(WeftError):
    """A field of the request has a wrong type, range or combination."""

    def __init__(self, field: str, message: str, reason: Reason = Reason.INVALID_ARGUMENT) -> None:
        super().__init__(reason, f"{field}: {message}", metadata={"field": field})
        self.field = field


def invalid_field(field: str, message: str) -> FieldError:
    """Returns an INVALID_ARGUMENT error; `field` is a path such as `messages[2].role`."""
    return FieldError(field, message)


def quoting_engine(error: WeftError, cause: str) -> WeftError:
    """Marks an error whose message quotes an engine. `cause`: what logs and records keep instead, in weft's words."""
    error.metadata[ENGINE_CAUSE] = cause
    return error


def with_field(error: WeftError, field: str) -> WeftError:
    """Returns the error with the name by which the caller knows the field."""
    own = error.metadata.get("field", "")
    if field == own:
        return error
    renamed = FieldError(field, error.message.removeprefix(f"{own}: "), error.reason)
    renamed.metadata, renamed.retry_after_seconds = error.metadata | renamed.metadata, error.retry_after_seconds
    return renamed


@contextmanager
def renaming_fields(name_of: Callable[[str], str]) -> Iterator[None]:
    """Renames the fields of errors raised in the block."""
    try:
        yield
    except WeftError as error:
        field = error.metadata.get("field", "")
        renamed = with_field(error, name_of(field)) if field else error
        if renamed is error:
            raise
        raise renamed from error


MAX_REFUSALS = 32
"""Maximum number of invalid values that an error lists."""


def refused_together(refused: Sequence[FieldError], omitted: int = 0) -> FieldError:
    """Returns several errors as one, with the field and reason of the first and a line for each of the others.

    Errors beyond MAX_REFUSALS and `omitted` ones are only counted.
    """
    omitted += max(0, len(refused) - MAX_REFUSALS)
    if len(refused) == 1 and not omitted:
        return refused[0]
    first = refused[0]
    lines = [first.message.removeprefix(f"{first.field}: "), *(each.message for each in refused[1:MAX_REFUSALS])]
    if omitted:
        lines.append(f"and {omitted} more")
    return FieldError(first.field, "\n  ".join(lines), first.reason)


async def found_or_none(answer: Awaitable[T]) -> T | None:
    """Returns the answer; None if it is NOT_FOUND."""
    try:
        return await answer
    except WeftError as error:
        if error.reason is Reason.NOT_FOUND:
            return None
        raise


def missing_package(purpose: str, package: str) -> str:
    """Returns an error message: what needs the package, and how to install it."""
    return (
        f"{purpose} the package {package}, which is not installed beside weft; install it there: pip install {package} "
        f"(installed by pipx: pipx inject weft {package})"
    )
