"""The delay of a process's event loop: how late its timers are."""

from typing_extensions import override

from weft.kernel.services.service_lifecycle import BackgroundLoop, Service, start_restarting
from weft.kernel.telemetry.metrics_page import MetricsPage
from weft.kernel.time.clock import Clock

SAMPLE_SECONDS = 0.25
DELAY_SECONDS = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0)
"""Buckets, from an idle loop to one that delays heartbeats."""


class LoopDelay(BackgroundLoop, Service):
    """Samples the delay of the event loop and expires idle label sets of the page."""

    def __init__(self, page: MetricsPage, clock: Clock, service: str) -> None:
        """`service` is the name of the process's service, such as `router`; `weft up` uses one name for all."""
        self._page = page
        self._clock = clock
        delays = page.histogram(
            "weft_event_loop_delay_seconds",
            "Delay of the event loop, sampled four times per second.",
            ("service",),
            DELAY_SECONDS,
        )
        self._delay = delays[service,]
        self._idle_noted = clock.monotonic()

    @override
    async def start(self) -> None:
        """Starts sampling."""
        self._task = start_restarting(self._run, name="loop-delay", clock=self._clock)

    @override
    async def _run(self) -> None:
        while True:
            due = self._clock.monotonic() + SAMPLE_SECONDS
            await self._clock.sleep(SAMPLE_SECONDS)
            now = self._clock.monotonic()
            self._delay.observe(max(0.0, now - due))
            if now - self._idle_noted >= self._page.limits.idle_seconds:
                self._idle_noted = now
                self._page.note_idle()
