"""Asks runners to give up idle models. Nothing waits for an answer: the policy is told what is under way."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

import structlog

from registry_svc.ledger.policy.eviction import REFUSAL_KEPT_SECONDS, Ask, AskState
from registry_svc.ledger.policy.leases import Lease, Wish
from registry_svc.mesh.runner_calls import RunnerCalls, YieldAnswer, YieldRequest
from weft.kernel.clock import Clock
from weft.kernel.service import start_task, stop_tasks

if TYPE_CHECKING:
    import asyncio

log = structlog.get_logger("weft.registry.ledger")

ASK_LIMIT_SECONDS = 60.0
"""How long a runner may take to answer. It answers when the model sleeps, and a backend may take its time to end."""


class Asker:
    """Every question that is under way or was answered lately, by lease. `nudge` is called with every answer."""

    def __init__(self, calls: RunnerCalls, clock: Clock, nudge: Callable[[], None]) -> None:
        self._calls = calls
        self._clock = clock
        self._nudge = nudge
        self._asks: dict[str, Ask] = {}
        self._tasks: dict[str, asyncio.Task[None]] = {}

    def asks(self) -> Mapping[str, Ask]:
        """By lease id, as they are now."""
        return dict(self._asks)

    def ask(self, wish: Wish, lease: Lease) -> None:
        """Have the holder of a lease asked to give way to `wish`."""
        lease_id = lease.grant.id
        if lease_id in self._tasks:
            return
        self._asks[lease_id] = Ask(lease_id=lease_id, state=AskState.PENDING, at=self._clock.monotonic())
        request = YieldRequest(
            runner=lease.grant.holder.name,
            model=lease.grant.purpose,
            lease_id=lease_id,
            priority=wish.priority,
            wanted_by=wish.purpose,
        )
        self._tasks[lease_id] = start_task(self._carry_out(request), name="ledger-ask")

    def sweep(self, wait_seconds: float) -> None:
        """Give up questions that take too long, and forget answers that no longer matter."""
        now = self._clock.monotonic()
        for ask in self.asks().values():
            if ask.state is not AskState.PENDING and now - ask.at >= REFUSAL_KEPT_SECONDS + wait_seconds:
                del self._asks[ask.lease_id]
            elif ask.state is AskState.PENDING and now - ask.at >= ASK_LIMIT_SECONDS:
                self._tasks[ask.lease_id].cancel()

    async def stop(self) -> None:
        """End every question. Safe to call twice."""
        tasks, self._tasks = list(self._tasks.values()), {}
        await stop_tasks(tasks)
        self._asks.clear()

    async def _carry_out(self, request: YieldRequest) -> None:
        answer = YieldAnswer.UNREACHABLE
        try:
            answer = await self._calls.yield_memory(request)
        finally:
            # Also when it was cancelled: nobody may be asked again at once who did not answer.
            self._take_in(request, answer)
        log.info(
            "asked for memory",
            runner=request.runner,
            model=request.model,
            lease=request.lease_id,
            wanted_by=request.wanted_by,
            answer=answer.name.lower(),
        )

    def _take_in(self, request: YieldRequest, answer: YieldAnswer) -> None:
        self._tasks.pop(request.lease_id, None)
        ask = self._asks.get(request.lease_id)
        if ask is not None:
            state = AskState.GIVEN_UP if answer is YieldAnswer.GIVEN_UP else AskState.REFUSED
            self._asks[request.lease_id] = replace(ask, state=state, at=self._clock.monotonic())
        self._nudge()
