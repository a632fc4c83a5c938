"""Load figures of an engine, sampled from a page of its server while it is running."""

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
from weft.kernel.errors.error_tree import WeftError
from weft.kernel.services.service_lifecycle import start_task, stop_tasks

if TYPE_CHECKING:
    from runner_svc.openai_upstream.client import OpenAiHttp

SAMPLE_SECONDS = 5.0
PAGE_SECONDS = 5.0
MAX_FAILED_SAMPLES = 3
"""Number of consecutive failed samples after which the last figures are dropped."""
LINGER_SECONDS = 1.0
"""How long a finished request may still count on the page."""
STEP_SECONDS = 10
"""Granularity of sample times, so that time alone rarely changes a report."""
_ABSENT = frozenset({401, 403, 404, 405, 501})
"""Statuses for a page that the server does not have, or not with this key."""


@dataclass(frozen=True, slots=True)
class MetricsPage:
    """A server's page of metrics."""

    path: str
    read: Callable[[str], runner_pb2.EngineLoad]
    has_others: bool = False
    """Whether other clients may send requests to the server: then it is sampled even when idle, and their requests are
    counted."""


class FigureSampler:
    """Samples the figures of an engine from the end of its load until it sleeps or ends."""

    def __init__(self) -> None:
        self.load: runner_pb2.EngineLoad | None = None
        """The last figures; None: unknown."""
        self.page = EnginePage()
        """The last page, for passing on its metrics."""
        self._sampling: asyncio.Task[None] | None = None

    def begin(self, http: "OpenAiHttp", page: MetricsPage | None) -> None:
        """Starts sampling if there is a page."""
        if page is not None:
            self._sampling = start_task(self._sample(http, page), name="engine-figures")

    async def end(self) -> None:
        """Stops sampling and drops the figures. Idempotent."""
        sampling, self._sampling, self.load = self._sampling, None, None
        self.page.text = ""
        if sampling is not None:
            await stop_tasks([sampling])

    async def _sample(self, http: "OpenAiHttp", page: MetricsPage) -> None:
        """Samples until the server reports that it has no such page."""
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
    """Returns the figures on a page, with the number of requests of other clients if there may be any."""
    load = page.read(text)
    if page.has_others and load.HasField("running_count"):
        load.other_count = max(0, load.running_count + load.waiting_count - own)
    return load


async def _page(http: "OpenAiHttp", path: str) -> tuple[int | None, str | None]:
    """Returns status and text of a page; None: no response, or an unusable page."""
    with suppress(WeftError):
        status, body = await http.call_route("GET", path, PAGE_SECONDS)
        usable = status == 200 and len(body) <= MAX_PAGE_BYTES
        return status, body.decode(errors="replace") if usable else None
    return None, None


def with_sample_time(load: runner_pb2.EngineLoad, at_seconds: float) -> runner_pb2.EngineLoad:
    """Returns figures with their sample time (UTC), unless the engine is idle and they say nothing."""
    counts = (load.running_count, load.waiting_count)
    knows_count = load.HasField("running_count") or load.HasField("waiting_count")
    if not (any(counts) if knows_count else load.kv_cache_share):
        return load
    stamped = runner_pb2.EngineLoad()
    stamped.CopyFrom(load)
    stamped.sample_time.CopyFrom(Timestamp(seconds=int(at_seconds) // STEP_SECONDS * STEP_SECONDS))
    return stamped
