"""Ambiguity of grammars and patterns, measured before an engine runs them.

llama.cpp follows all ways to reach the next character concurrently. Nested repetitions of a group that may be empty,
or alternatives with a common prefix, have exponentially many: the engine hangs for all requests.
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Final, NamedTuple

MAX_WAYS: Final = 10_000
"""Maximum number of ways to reach the next character, or to match nothing."""
MAX_RULES_IN_A_ROW: Final = 100
"""Maximum chain of grammar rules that refer to each other before a character."""
_MOST: Final = MAX_WAYS + 1
_GRAMMAR: Final = re.compile(
    r'(?P<skip>\s+|\#[^\n]*)|(?P<empty>"")|(?P<atom>"(?:\\.|[^"\\])*"|\[(?:\\.|[^\]\\])*\]|<[^>]*>|\.)|(?P<is>::=)'
    r"|(?P<name>[A-Za-z0-9_-]+)|(?P<either>\|)|(?P<open>\()|(?P<close>\))|(?P<times>[*+?]|\{[^}]*\})|(?P<other>.)",
    re.DOTALL,
)
_PATTERN: Final = re.compile(
    r"(?P<empty>[\^$]|\\[bBAzZ]|\(\?[A-Za-z-]+\))|(?P<open>\((?:\?(?:P?<\w+>|[A-Za-z-]*:))?)|(?P<close>\))|(?P<either>\|)"
    r"|(?P<times>(?:[*+?]|\{\d*,?\d*\})\??)|(?P<atom>\\[pPx]\{[^}]*\}|\\.|\[\^?\]?(?:\\.|[^\]\\])*\]|.)",
    re.DOTALL,
)


class Ways(NamedTuple):
    """Numbers of ways, capped at MAX_WAYS + 1."""

    empty: int
    """To match nothing."""
    start: int
    """To reach a first character."""


_EMPTY: Final = Ways(1, 0)
_CHARACTER: Final = Ways(0, 1)


class Token(NamedTuple):
    """A token of a grammar or pattern; `kind` is the name of its regex group."""

    kind: str
    text: str


def pattern_ways(pattern: str) -> int:
    """Returns the maximum number of ways in which a regular expression reaches a character, at most MAX_WAYS + 1."""
    reader = _Reader(_tokens(_PATTERN, pattern))
    return max(*reader.whole(), reader.most)


def grammar_ways(grammar: str) -> int:
    """Returns the maximum number of ways in which a GBNF rule reaches a character, at most MAX_WAYS + 1."""
    rules: dict[str, list[Token]] = {}
    tokens = [token for token in _tokens(_GRAMMAR, grammar) if token.kind != "skip"]
    current: list[Token] = []
    for token, following in zip(tokens, [*tokens[1:], Token("", "")], strict=False):
        if token.kind == "name" and following.kind == "is":
            current = rules.setdefault(token.text, [])
        elif token.kind != "is":
            current.append(token)
    read = _Rules(rules)
    try:
        return max((max(*read.ways(name, 0), read.most[name]) for name in rules), default=0)
    except (_TooManyRulesError, RecursionError):
        return _MOST


class _TooManyRulesError(Exception):
    """Rules refer to each other MAX_RULES_IN_A_ROW times without a character."""


@dataclass(frozen=True, slots=True)
class _Rules:
    tokens: Mapping[str, list[Token]]
    known: dict[str, Ways] = field(default_factory=dict)
    most: dict[str, int] = field(default_factory=dict)

    def ways(self, name: str, depth: int) -> Ways:
        if name not in self.known:
            if depth > MAX_RULES_IN_A_ROW:
                raise _TooManyRulesError
            self.known[name] = _CHARACTER  # of a rule within itself
            reader = _Reader(iter(self.tokens.get(name, ())), self, depth + 1)
            self.known[name] = reader.whole()
            self.most[name] = reader.most
        return self.known[name]


class _Reader:
    """Reads tokens and counts their ways."""

    def __init__(self, tokens: Iterator[Token], rules: _Rules | None = None, depth: int = 0) -> None:
        self._tokens = list(tokens)
        self._rules = rules
        self._depth = depth
        self._at = 0
        self.most = 0
        """Maximum number of ways at any position."""

    def whole(self) -> Ways:
        """Returns the ways of all tokens, up to an unmatched closing bracket."""
        return self._either()

    def _either(self) -> Ways:
        found = self._sequence()
        while self._kind() == "either":
            self._at += 1
            other = self._sequence()
            found = Ways(_sum(found.empty, other.empty), _sum(found.start, other.start))
        return found

    def _sequence(self) -> Ways:
        empty, start = 1, 0
        here = _EMPTY  # of the rest, from the last character that cannot be left out
        while self._kind() not in ("", "either", "close"):
            ways = self._repeated()
            start = _sum(start, empty * ways.start)
            empty = min(empty * ways.empty, _MOST)
            here = Ways(min(here.empty * ways.empty, _MOST), _sum(here.start, here.empty * ways.start))
            self.most = max(self.most, *here)
            if not here.empty:
                here = _EMPTY
        return Ways(empty, start)

    def _repeated(self) -> Ways:
        ways = self._one()
        while self._kind() == "times":
            ways = _repeat(ways, self._tokens[self._at].text)
            self._at += 1
        return ways

    def _one(self) -> Ways:
        token = self._tokens[self._at]
        self._at += 1
        if token.kind == "open":
            ways = self._either()
            self._at += self._kind() == "close"
            return ways
        if token.kind == "name" and self._rules is not None:
            return self._rules.ways(token.text, self._depth)
        return _EMPTY if token.kind == "empty" else _CHARACTER

    def _kind(self) -> str:
        return self._tokens[self._at].kind if self._at < len(self._tokens) else ""


def _tokens(form: re.Pattern[str], text: str) -> Iterator[Token]:
    for found in form.finditer(text):
        yield Token(found.lastgroup or "", found[0])


def _repeat(ways: Ways, times: str) -> Ways:
    least, most = _bounds(times)
    if not ways.empty:
        return Ways(int(least == 0), ways.start)
    if most is None:
        return Ways(_sum(ways.empty, 1), _sum(ways.start, ways.start * ways.empty))
    if ways.empty == 1:
        return Ways(min(max(most - least, 0) + 1, _MOST), min(most * ways.start, _MOST))
    empty = start = 0
    power = 1
    for count in range(most + 1):
        empty = _sum(empty, power if count >= least else 0)
        start = _sum(start, power * ways.start if count < most else 0)
        power *= ways.empty
        if power > MAX_WAYS and count < most:
            return Ways(_MOST, _MOST)
    return Ways(empty, start)


def _bounds(times: str) -> tuple[int, int | None]:
    if times[0] != "{":
        return int(times[0] == "+"), 1 if times[0] == "?" else None
    low, comma, high = times.strip("{}? ").partition(",")
    digits = [int(text[:9]) if text.strip().isdecimal() else None for text in (low.strip(), high.strip())]
    return digits[0] or 0, digits[1] if comma else digits[0]


def _sum(one: int, other: int) -> int:
    return min(one + other, _MOST)
