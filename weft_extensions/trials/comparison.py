"""What is compared between the two answers of a pair before a person judges, and the summary of a trial. Pure."""

import json
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from statistics import median
from typing import Any

from weft.api.gateway.v1.trial_report_pb2 import TrialChecks, TrialPair, TrialSpeed, TrialSummary
from weft.api.registry.v1.trial_pb2 import Verdict
from weft.kernel.schemas.value_check import UncheckedError


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A tool call of an answer."""

    name: str
    arguments_text: str


@dataclass(frozen=True, slots=True)
class Answer:
    """One answer of a pair, with its measured times; None: not measured."""

    text: str
    tool_calls: tuple[ToolCall, ...]
    tokens: int
    first_token_seconds: float | None
    tokens_per_second: float | None

    @property
    def speed(self) -> TrialSpeed:
        """Its times as a message."""
        return TrialSpeed(first_token_seconds=self.first_token_seconds, tokens_per_second=self.tokens_per_second)


def check_pair(candidate: Answer, against: Answer, is_valid: Callable[[Any], bool] | None) -> TrialChecks:
    """Compares two answers. `is_valid` checks a JSON value against the requested schema, if there is one.

    If it raises UncheckedError, neither answer is said to match or not.
    """
    has_calls = bool(candidate.tool_calls or against.tool_calls)
    candidate_valid = against_valid = None
    if is_valid is not None:
        with suppress(UncheckedError):
            candidate_valid, against_valid = _is_valid(candidate, is_valid), _is_valid(against, is_valid)
    return TrialChecks(
        candidate_valid=candidate_valid,
        against_valid=against_valid,
        same_tool_calls=_comparable(candidate) == _comparable(against) if has_calls else None,
        length_ratio=candidate.tokens / against.tokens if against.tokens else None,
        candidate_speed=candidate.speed,
        against_speed=against.speed,
    )


def summarize(pairs: Sequence[TrialPair], verdicts: Iterable[int]) -> TrialSummary:
    """Returns the summary of a trial from its pairs and all verdicts, also those about pairs that are deleted."""
    states, judged = Counter(pair.state for pair in pairs), Counter(verdicts)
    checks = [pair.checks for pair in pairs if pair.HasField("checks")]
    ratios = [each.length_ratio for each in checks if each.HasField("length_ratio")]
    candidate, against = _medians(checks)
    return TrialSummary(
        answered=states["answered"],
        waiting=states["waiting"],
        failed=states["failed"],
        with_schema=sum(each.HasField("candidate_valid") for each in checks),
        candidate_valid=sum(each.candidate_valid for each in checks),
        against_valid=sum(each.against_valid for each in checks),
        with_tool_calls=sum(each.HasField("same_tool_calls") for each in checks),
        same_tool_calls=sum(each.same_tool_calls for each in checks),
        length_ratio=median(ratios) if ratios else None,
        candidate_speed=candidate,
        against_speed=against,
        candidate_preferred=judged[Verdict.VERDICT_CANDIDATE],
        against_preferred=judged[Verdict.VERDICT_AGAINST],
        same=judged[Verdict.VERDICT_SAME],
    )


def _medians(checks: Iterable[TrialChecks]) -> tuple[TrialSpeed, TrialSpeed]:
    """Returns the medians of both sides; pairs count if both answers have the value, so both are of the same pairs."""
    sides = [(each.candidate_speed, each.against_speed) for each in checks]
    found = (TrialSpeed(), TrialSpeed())
    for name in ("first_token_seconds", "tokens_per_second"):
        both = [pair for pair in sides if all(side.HasField(name) for side in pair)]
        if both:
            for speed, values in zip(found, zip(*both, strict=True), strict=True):
                setattr(speed, name, median(getattr(value, name) for value in values))
    return found


def _is_valid(answer: Answer, is_valid: Callable[[Any], bool]) -> bool:
    try:
        return is_valid(_parsed(answer.text))
    except (ValueError, RecursionError):
        return False


def _comparable(answer: Answer) -> Counter[tuple[str, str]]:
    """Returns the tool calls of an answer; parallel calls have no order."""
    return Counter((call.name, _canonical(call.arguments_text)) for call in answer.tool_calls)


def _canonical(arguments_text: str) -> str:
    """Returns arguments without differences in spaces, order of members and notation; text that is not JSON as is."""
    try:
        # No arguments are sent as an empty text by some models, as an empty object by others.
        return json.dumps(_parsed(arguments_text or "{}"), sort_keys=True)
    except (ValueError, RecursionError):
        return arguments_text


def _parsed(text: str) -> Any:
    return json.loads(text, parse_float=_number, parse_constant=_refuse)


def _number(text: str) -> int | float:
    value = float(text)
    return int(value) if value.is_integer() else value


def _refuse(constant: str) -> Any:
    raise ValueError(f"{constant} is not JSON")
