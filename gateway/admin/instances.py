"""Engine descriptions and engine logs, read from the runners."""

import asyncio
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass
from typing import Any

from weft.api.gateway.v1.engine_log_pb2 import EngineLog
from weft.api.runner.v1 import runner_service_pb2, runner_service_pb2_grpc
from weft.dispatch.fleet import FleetSource, ModelView
from weft.kernel.channels.rpc import ChannelPool, calling
from weft.kernel.errors.error_tree import WeftError
from weft.kernel.errors.reasons import Reason
from weft.kernel.time.clock import Clock
from weft.kernel.values.address import metadata_of
from weft.kernel.values.unknown_names import RUNNER, unknown_name

TIMEOUT_SECONDS = 2.0
"""Timeout of each runner's answer, so that a slow runner does not delay the others."""
FRESH_SECONDS = 0.25
"""Maximum age of a cached answer, low because it shows process ids of engines that may have restarted."""
LOG_TIMEOUT_SECONDS = 5.0
"""Timeout for a runner's last lines. Streams with `follow` have none."""
MAX_ASKED_AT_ONCE = 16
MAX_REMEMBERED = 1024

Instances = dict[str, runner_service_pb2.InstanceDescription]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Answer:
    incarnation: str
    at: float
    instances: Instances


class RunnerDescriptions:
    """Instance descriptions from the runners."""

    def __init__(self, fleet: FleetSource, channels: ChannelPool, clock: Clock) -> None:
        self._fleet = fleet
        self._channels = channels
        self._clock = clock
        self._answers: dict[str, _Answer] = {}
        self._turns = asyncio.Semaphore(MAX_ASKED_AT_ONCE)

    async def instances(self, runners: Sequence[str]) -> dict[str, Instances]:
        """Returns descriptions by runner and model, at most FRESH_SECONDS old, without runners that do not answer.

        Never raises.
        """
        names = list(dict.fromkeys(runners))
        found = await asyncio.gather(*(self._instances(name) for name in names))
        return {name: instances for name, instances in zip(names, found, strict=True) if instances is not None}

    async def _instances(self, name: str) -> Instances | None:
        runner = self._fleet.view.runners.get(name)
        if runner is None or not runner.active:
            return None
        known = self._answers.get(name)
        now = self._clock.monotonic()
        if known is not None and known.incarnation == runner.incarnation and now - known.at < FRESH_SECONDS:
            return known.instances
        async with self._turns:
            instances = await self._ask(runner.address)
        if instances is not None:
            while len(self._answers) >= MAX_REMEMBERED:
                del self._answers[next(iter(self._answers))]
            self._answers[name] = _Answer(incarnation=runner.incarnation, at=now, instances=instances)
        return instances

    async def _ask(self, address: str) -> Instances | None:
        try:
            answer = await self._described(address)
        except WeftError:
            return None
        return {instance.model: instance for instance in answer.instances}

    async def describe(self, runner: str, line_count: int) -> runner_service_pb2.DescribeResponse:
        """Returns a runner's current description of its engines, with the last lines of their logs.

        Raises NOT_FOUND for an unknown runner, NO_RUNNER_AVAILABLE if it is away, WORKER_LOST if it does not answer.
        """
        runners = self._fleet.view.runners
        found = runners.get(runner)
        if found is None:
            raise unknown_name(RUNNER, runner, runners)
        if not found.active:
            raise WeftError(Reason.NO_RUNNER_AVAILABLE, f"there is no runner {runner}")
        return await self._described(found.address, line_count)

    async def _described(self, address: str, line_count: int = 0) -> runner_service_pb2.DescribeResponse:
        stub: Any = runner_service_pb2_grpc.RunnerServiceStub(await self._channels.get(address))
        request = runner_service_pb2.DescribeRequest(log_line_count=line_count)
        with calling(Reason.WORKER_LOST):
            answer: runner_service_pb2.DescribeResponse = await stub.Describe(
                request, timeout=TIMEOUT_SECONDS, metadata=metadata_of(address)
            )
        return answer


class EngineLogClient:
    """Engine logs from the runners."""

    def __init__(self, fleet: FleetSource, channels: ChannelPool) -> None:
        self._fleet = fleet
        self._channels = channels

    async def lines(self, model: ModelView, line_count: int, *, follow: bool) -> AsyncGenerator[EngineLog]:
        """Yields the last lines of a model's engine log, and with `follow` every new one until the runner stops.

        Raises NO_RUNNER_AVAILABLE if no runner serves the model, WORKER_LOST if its runner cannot be reached, and the
        runner's own errors.
        """
        runner = self._fleet.view.runners.get(model.runner)
        if runner is None or not runner.active:
            raise WeftError(Reason.NO_RUNNER_AVAILABLE, f"no runner serves {model.name} now")
        stub: Any = runner_service_pb2_grpc.RunnerServiceStub(await self._channels.get(runner.address))
        request = runner_service_pb2.TailLogsRequest(model=model.name, line_count=line_count, follow=follow)
        timeout_seconds = None if follow else LOG_TIMEOUT_SECONDS
        call = stub.TailLogs(request, metadata=metadata_of(runner.address), timeout=timeout_seconds)
        try:
            with calling(Reason.WORKER_LOST):
                async for batch in call:
                    yield EngineLog(
                        model=model.name, runner=runner.name, lines=batch.lines, lost_line_count=batch.lost_line_count
                    )
        finally:
            call.cancel()
