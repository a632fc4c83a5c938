"""Requests to runners to evict idle models. No caller waits for an answer: the policy sees each attempt's state."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

import structlog

from registry_svc.ledger.policy.eviction import REFUSAL_KEPT_SECONDS, EvictionAttempt, EvictionState
from registry_svc.ledger.policy.leases import Lease, MemoryRequest
from registry_svc.mesh.runner_calls import EvictionAnswer, EvictionRequest, RunnerCalls
from weft.kernel.clock import Clock
from weft.kernel.service import start_task, stop_tasks

if TYPE_CHECKING:
    import asyncio

log = structlog.get_logger("weft.registry.ledger")

EVICTION_LIMIT_SECONDS = 60.0
"""How long a runner may take to answer. It answers once the model sleeps, and a backend may take time to end."""


class Evictor:
    """Sends eviction requests and keeps the state of each attempt by lease. `wake` is called with every answer."""

    def __init__(self, calls: RunnerCalls, clock: Clock, wake: Callable[[], None]) -> None:
        self._calls = calls
        self._clock = clock
        self._wake = wake
        self._attempts: dict[str, EvictionAttempt] = {}
        self._tasks: dict[str, asyncio.Task[None]] = {}

    def attempts(self) -> Mapping[str, EvictionAttempt]:
        """Return the attempts that are pending or were answered lately, by lease id."""
        return dict(self._attempts)

    def evict(self, lease: Lease, wanted: MemoryRequest) -> None:
        """Start to have the model of `lease` evicted for `wanted`, unless that is under way."""
        lease_id = lease.grant.id
        if lease_id in self._tasks:
            return
        self._attempts[lease_id] = EvictionAttempt(
            lease_id=lease_id, state=EvictionState.PENDING, at=self._clock.monotonic()
        )
        request = EvictionRequest(
            runner=lease.grant.holder.name,
            model=lease.grant.purpose,
            lease_id=lease_id,
            priority=wanted.priority,
            wanted_by=wanted.purpose,
        )
        self._tasks[lease_id] = start_task(self._send(request), name="ledger-evict")

    def sweep(self, wait_seconds: float) -> None:
        """Cancel requests that take too long, and forget answers that no longer matter."""
        now = self._clock.monotonic()
        for attempt in self.attempts().values():
            if attempt.state is not EvictionState.PENDING and now - attempt.at >= REFUSAL_KEPT_SECONDS + wait_seconds:
                del self._attempts[attempt.lease_id]
            elif attempt.state is EvictionState.PENDING and now - attempt.at >= EVICTION_LIMIT_SECONDS:
                self._tasks[attempt.lease_id].cancel()

    async def stop(self) -> None:
        """Cancel every request. Safe to call twice."""
        tasks, self._tasks = list(self._tasks.values()), {}
        await stop_tasks(tasks)
        self._attempts.clear()

    async def _send(self, request: EvictionRequest) -> None:
        answer = EvictionAnswer.UNREACHABLE
        try:
            answer = await self._calls.evict(request)
        finally:
            # Also after a cancellation: a runner that did not answer must not get the same request again at once.
            self._record(request, answer)
        log.info(
            "asked for memory",
            runner=request.runner,
            model=request.model,
            lease=request.lease_id,
            wanted_by=request.wanted_by,
            answer=answer.name.lower(),
        )

    def _record(self, request: EvictionRequest, answer: EvictionAnswer) -> None:
        self._tasks.pop(request.lease_id, None)
        attempt = self._attempts.get(request.lease_id)
        if attempt is not None:
            state = EvictionState.GIVEN_UP if answer is EvictionAnswer.GIVEN_UP else EvictionState.REFUSED
            self._attempts[request.lease_id] = replace(attempt, state=state, at=self._clock.monotonic())
        self._wake()
