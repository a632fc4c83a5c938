"""Parses load figures from a server's metrics page in Prometheus' text format. Pure, with limits."""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from weft.api.registry.v1 import runner_pb2

MAX_PAGE_BYTES = 2 * 1024 * 1024
"""Maximum size of a page; vLLM's is below 100 KiB per engine."""
MAX_COUNT = 2**53
_WHOLE_SHARES = 100
"""Shares are rounded to one percent, so that reports change only with the load."""
_SAMPLE = re.compile(r"([a-zA-Z_:][a-zA-Z0-9_:]{0,127})(?:\{([^}]{0,4096})\})? ([0-9.eE+-]{1,32})$")


@dataclass(frozen=True, slots=True)
class Sample:
    """A line of a page."""

    name: str
    labels: str
    value: float


@dataclass(frozen=True, slots=True, kw_only=True)
class MetricNames:
    """Names of a server's metrics, with alternatives for different versions; empty: there is none."""

    running: Sequence[str] = ()
    waiting: Sequence[str] = ()
    cache_share: Sequence[str] = ()
    """Share of the KV cache that is in use, 0 to 1."""
    preemptions: Sequence[str] = ()
    prefix_queries: Sequence[str] = ()
    prefix_hits: Sequence[str] = ()
    cache_held: Sequence[str] = ()
    """Share of the KV cache that may include prefixes no request uses; not reported."""

    @property
    def all(self) -> tuple[str, ...]:
        """The names of all its metrics."""
        return tuple(name for field in fields(self) for name in getattr(self, field.name))


NO_METRICS = MetricNames()


def samples_of(page: str) -> list[Sample]:
    """Returns the lines of a page with a count or a share."""
    return list(_samples(page))


def load_of(samples: Sequence[Sample], names: MetricNames) -> "runner_pb2.EngineLoad":
    """Returns the figures in a page's lines; missing ones are unset. Several engines are added up."""
    # Imported here because presets are also read by commands that do not need the generated messages.
    from weft.api.registry.v1 import runner_pb2  # noqa: PLC0415

    def total(wanted: Sequence[str]) -> int | None:
        found = [sample.value for sample in samples if sample.name in wanted]
        return min(round(sum(found)), MAX_COUNT) if found else None

    shares = [sample.value for sample in samples if sample.name in names.cache_share]
    share = round(min(1.0, max(shares)) * _WHOLE_SHARES) / _WHOLE_SHARES if shares else None
    return runner_pb2.EngineLoad(
        running_count=total(names.running),
        waiting_count=total(names.waiting),
        kv_cache_share=share,
        preemption_count=total(names.preemptions),
        prefix_query_tokens=total(names.prefix_queries),
        prefix_hit_tokens=total(names.prefix_hits),
    )


def _samples(page: str) -> Iterator[Sample]:
    for line in page.splitlines():
        if (found := _SAMPLE.match(line)) is None:
            continue
        try:
            value = float(found[3])
        except ValueError:
            continue
        if 0 <= value <= MAX_COUNT:
            yield Sample(found[1], found[2] or "", value)
