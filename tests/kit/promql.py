"""Selectors of PromQL expressions, and checks whether a metrics page has matching series."""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import promql_parser

OF_PROMETHEUS = frozenset({"up"})
"""Metrics that Prometheus generates."""
OF_THE_SCRAPE = frozenset({"job", "instance"})
"""Labels that Prometheus adds."""
_SUFFIXES = ("_bucket", "_sum", "_count", "_total")
_OPERATORS = {"MatchOp.Equal": "=", "MatchOp.NotEqual": "!=", "MatchOp.Re": "=~", "MatchOp.NotRe": "!~"}
"""Keyed by the printed form, because the parser's operators are not hashable."""
_VARIABLES = {"$__rate_interval": "5m", "$__range": "1h", "$model": ".*"}


@dataclass(frozen=True, slots=True)
class Series:
    """A series on a page."""

    name: str
    labels: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class Selector:
    """A vector selector."""

    text: str
    name: str
    matchers: tuple[tuple[str, str, str], ...]
    """Label, operator and value."""

    @property
    def family(self) -> str:
        """Metric name without the suffixes of histograms and counters."""
        return next((self.name.removesuffix(end) for end in _SUFFIXES if self.name.endswith(end)), self.name)

    def matches(self, series: Series) -> bool:
        """Whether it selects a series on a page that Prometheus has not scraped."""
        return self.name == series.name and all(
            _holds(series.labels.get(label, ""), operator, value)
            for label, operator, value in self.matchers
            if label not in OF_THE_SCRAPE
        )


def selectors(expression: str) -> list[Selector]:
    """Returns the selectors in a panel's or alert's expression. Raises ValueError if it cannot be parsed."""
    for variable, value in _VARIABLES.items():
        expression = expression.replace(variable, value)
    found: list[Selector] = []

    def visit(node: object) -> None:
        if isinstance(node, promql_parser.VectorSelector) and node.name not in OF_PROMETHEUS:
            matchers = tuple((one.name, _OPERATORS[str(one.op)], one.value) for one in node.matchers.matchers)
            found.append(Selector(node.prettify(), str(node.name), matchers))

    promql_parser.walk(promql_parser.parse(expression), visit, lambda _: None)
    return found


def unmatched(expressions: Iterable[str], series: Iterable[Series]) -> list[str]:
    """Returns the selectors without a matching series, without duplicates."""
    known = list(series)
    wanted = {selector.text: selector for expression in expressions for selector in selectors(expression)}
    return [text for text, selector in wanted.items() if not any(map(selector.matches, known))]


def _holds(found: str, operator: str, value: str) -> bool:
    if operator in {"=~", "!~"}:
        return bool(re.fullmatch(value, found)) == (operator == "=~")
    return (found == value) == (operator == "=")
