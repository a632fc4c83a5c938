"""A dashboard as a value: sections of panels, each with its PromQL."""

from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum

RATE = "$__rate_interval"
"""Grafana's variable for the window of `rate`: four scrape intervals at least."""
MODEL = 'model=~"$model"'
"""The matcher of a panel that follows the board's choice of models."""


class View(Enum):
    """How a panel draws its series."""

    TILE = "stat"
    LINES = "timeseries"
    AREAS = "stacked timeseries"
    TABLE = "table"


class Unit(Enum):
    """The unit of a panel's values, by its name in Grafana."""

    SECONDS = "s"
    SHARE = "percentunit"
    BYTES = "bytes"
    PER_SECOND = "reqps"
    NUMBER = "short"
    WATTS = "watt"


@dataclass(frozen=True, slots=True)
class Query:
    """A PromQL expression and the legend of its series."""

    expression: str
    legend: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Bounds:
    """The values from which on a tile is yellow and red; falling: below which."""

    warning: float
    critical: float
    is_falling: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Panel:
    """A panel."""

    title: str
    about: str
    """What it shows and what to do about it, shown at the title."""
    unit: Unit
    queries: tuple[Query, ...]
    view: View = View.LINES
    width: int = 8
    """Of 24 columns."""
    bounds: Bounds | None = None


@dataclass(frozen=True, slots=True)
class Section:
    """Panels under one heading."""

    title: str
    panels: tuple[Panel, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Board:
    """A dashboard."""

    uid: str
    """Also the name of its file."""
    title: str
    about: str
    sections: tuple[Section, ...]

    @property
    def panels(self) -> Iterator[Panel]:
        """Yields every panel, in order."""
        for section in self.sections:
            yield from section.panels


def rate_by(metric: str, *labels: str, where: str = MODEL) -> str:
    """Returns the rate of a counter per label set."""
    return f"sum by ({', '.join(labels)}) (rate({metric}{{{where}}}[{RATE}]))"


def quantile(share: float, metric: str, *labels: str, where: str = MODEL) -> str:
    """Returns a quantile of a histogram per label set."""
    by = ", ".join(("le", *labels))
    return f"histogram_quantile({share}, sum by ({by}) (rate({metric}_bucket{{{where}}}[{RATE}])))"


def share_within(metric: str, bound: str, where: str = MODEL) -> str:
    """Returns the share of a histogram's observations that are at most a bucket's bound."""
    within = f'sum(rate({metric}_bucket{{{where}, le="{bound}"}}[{RATE}]))'
    return f"{within} / sum(rate({metric}_count{{{where}}}[{RATE}]))"
