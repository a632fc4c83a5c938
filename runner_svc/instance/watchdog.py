"""The watchdog of a backend: samples the progress of the engine and its requests for `policy.progress`."""

import asyncio

from runner_svc.backend.port import Backend
from runner_svc.policy.progress import Observation, ProgressPolicy, RequestSample, Verdict
from runner_svc.policy.timeouts import TimeoutProfile
from runner_svc.request_records import RequestRecord, RequestRecords, RequestState
from runner_svc.waiting import end_tasks
from weft.kernel.errors.error_tree import WeftError
from weft.kernel.errors.reasons import Reason
from weft.kernel.telemetry.log import get_logger
from weft.kernel.time.clock import Clock

log = get_logger("weft.watchdog")

PROBE_TIMEOUT_INTERVALS = 2.0
"""Timeout of a probe of an idle engine, in probe intervals."""


class Watchdog:
    """Watches a backend from ready to its end. Every start has a new watchdog."""

    def __init__(self, records: RequestRecords, backend: Backend, profile: TimeoutProfile, clock: Clock) -> None:
        self._records = records
        self._backend = backend
        self._profile = profile
        self._clock = clock
        self._policy = ProgressPolicy(profile)
        self._probe: asyncio.Task[bool] | None = None

    async def run(self) -> WeftError:
        """Fails stalled requests. Returns STALL_TIMEOUT once the backend must be restarted.

        The caller then ends the remaining requests. Never returns for an attached server: its requests fail, but it is
        not restarted.
        """
        try:
            while True:
                # Only the sleep paces the samples: nothing is awaited in between, so a gap means a suspended machine.
                await self._clock.sleep(self._profile.probe_interval_seconds)
                verdict = self._policy.look(self._see())
                self._act(verdict)
                if verdict.restart and self._owned:
                    return WeftError(Reason.STALL_TIMEOUT, verdict.restart)
        finally:
            if self._probe is not None:
                await end_tasks(self._probe)

    @property
    def _owned(self) -> bool:
        return self._backend.process_id is not None

    def _see(self) -> Observation:
        running = self._records.running
        requests = [_signs_of(record) for record in running]
        signs = self._backend.signs() if self._owned and self._policy.wants_engine(requests) else None
        return Observation(
            now=self._clock.monotonic(),
            requests=requests,
            last_token=self._last_token() if running else None,
            last_report=self._last_report(),
            engine=signs,
            owned=self._owned,
            responded=self._probe_result(),
        )

    def _act(self, verdict: Verdict) -> None:
        for record in self._records.running:
            if verdict.working and record.state is RequestState.PREFILL:
                record.note_work()
            for failure in verdict.failures:
                if failure.key == id(record):
                    log.warning("request stalled", request_id=record.request_id, message=failure.message)
                    record.fail(WeftError(failure.reason, failure.message))
        if verdict.probe and self._probe is None:
            timeout = PROBE_TIMEOUT_INTERVALS * self._profile.probe_interval_seconds
            self._probe = asyncio.create_task(self._backend.responds(timeout), name="probe-backend")

    def _probe_result(self) -> bool | None:
        """Returns the result of the probe once it has ended."""
        if self._probe is None or not self._probe.done():
            return None
        probe, self._probe = self._probe, None
        return probe.exception() is None and probe.result()

    def _last_token(self) -> float | None:
        return max((record.last_token for record in self._records.all if record.last_token is not None), default=None)

    def _last_report(self) -> float | None:
        return max((record.last_report for record in self._records.all if record.last_report is not None), default=None)


def _signs_of(record: RequestRecord) -> RequestSample:
    asked = record.turn_started > 0.0
    return RequestSample(
        key=id(record),
        started=record.started,
        turn_started=record.turn_started,
        last_progress=record.last_progress,
        last_token=record.last_token,
        last_report=record.last_report,
        has_content=record.turn_has_content,
        in_engine=asked and not record.with_caller and record.state is not RequestState.RUNNING_TOOL,
    )
