"""The figures of an engine's load as a runner reports them: sampled from a page of its server while it runs."""

import asyncio
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING

from google.protobuf.timestamp_pb2 import Timestamp

from runner_svc.backend.port import EnginePage
from runner_svc.runtimes.metrics_page import MAX_PAGE_BYTES
from weft.api.registry.v1 import runner_pb2
from weft.kernel.errors import WeftError
from weft.kernel.service import start_task, stop_tasks

if TYPE_CHECKING:
    from runner_svc.openai_upstream.client import OpenAiHttp

SAMPLE_SECONDS = 5.0
"""Interval of the samples."""
PAGE_SECONDS = 5.0
"""Timeout of a page."""
MAX_FAILED_SAMPLES = 3
"""Samples in a row that fail until the last figures are dropped."""
LINGER_SECONDS = 1.0
"""How long before a sample a request may have ended and still count on the page."""
STEP_SECONDS = 10
"""Steps of the time of a sample: a report changes no more often for the time alone."""
_ABSENT = frozenset({401, 403, 404, 405, 501})
"""Statuses of a page that the server does not have, or not for this key."""


@dataclass(frozen=True, slots=True)
class MetricsPage:
    """A server's page of metrics."""

    path: str
    read: Callable[[str], runner_pb2.EngineLoad]
    """Returns the figures on the page."""
    has_others: bool = False
    """Whether others than this runner may send requests to the server: then it is sampled while it is idle too, and
    their requests are counted."""


class FigureSampler:
    """Samples the figures of one engine, from the end of its load to its sleep or end."""

    def __init__(self) -> None:
        self.load: runner_pb2.EngineLoad | None = None
        """The last figures; None: unknown."""
        self.page = EnginePage()
        """The last page, for those who pass its metrics on."""
        self._sampling: asyncio.Task[None] | None = None

    def begin(self, http: "OpenAiHttp", page: MetricsPage | None) -> None:
        """Begin to sample; without a page nothing is sampled."""
        if page is not None:
            self._sampling = start_task(self._sample(http, page), name="engine-figures")

    async def end(self) -> None:
        """Forget the figures and sample no more. Idempotent."""
        sampling, self._sampling, self.load = self._sampling, None, None
        self.page.text = ""
        if sampling is not None:
            await stop_tasks([sampling])

    async def _sample(self, http: "OpenAiHttp", page: MetricsPage) -> None:
        """Sample until the server says that it has no such page."""
        failures, counted = 0, 0
        while True:
            has_worked, counted = http.request_count != counted, http.request_count
            if (
                page.has_others
                or http.in_flight
                or has_worked
                or self.load is None
                or self.load.HasField("sample_time")
            ):
                status, text = await _page(http, page.path)
                if status in _ABSENT:
                    return
                failures = 0 if text is not None else failures + 1
                self.page.failed_count += text is None
                if text is not None:
                    self.page.text = text
                    self.load = with_sample_time(_counted(page, text, http.most_in_flight), time.time())
                elif failures >= MAX_FAILED_SAMPLES:
                    self.load, self.page.text = None, ""
            await asyncio.sleep(max(0.0, SAMPLE_SECONDS - LINGER_SECONDS))
            http.most_in_flight = http.in_flight
            await asyncio.sleep(min(LINGER_SECONDS, SAMPLE_SECONDS))


def _counted(page: MetricsPage, text: str, own: int) -> runner_pb2.EngineLoad:
    """Returns the figures on a page, with the number of requests of others where there may be any."""
    load = page.read(text)
    if page.has_others and load.HasField("running_count"):
        load.other_count = max(0, load.running_count + load.waiting_count - own)
    return load


async def _page(http: "OpenAiHttp", path: str) -> tuple[int | None, str | None]:
    """Returns the status and the text of a page; None: there is no answer, or it is not usable."""
    with suppress(WeftError):
        status, body = await http.call_route("GET", path, PAGE_SECONDS)
        usable = status == 200 and len(body) <= MAX_PAGE_BYTES
        return status, body.decode(errors="replace") if usable else None
    return None, None


def with_sample_time(load: runner_pb2.EngineLoad, at_seconds: float) -> runner_pb2.EngineLoad:
    """Returns figures with the time of their sample (UTC), unless the engine has no request: they say nothing then."""
    counts = (load.running_count, load.waiting_count)
    knows_count = load.HasField("running_count") or load.HasField("waiting_count")
    if not (any(counts) if knows_count else load.kv_cache_share):
        return load
    stamped = runner_pb2.EngineLoad()
    stamped.CopyFrom(load)
    stamped.sample_time.CopyFrom(Timestamp(seconds=int(at_seconds) // STEP_SECONDS * STEP_SECONDS))
    return stamped
