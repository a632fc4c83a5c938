"""A runner as `weft runner conformance` examines it, for tests of single checks."""

import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from runner_harness import TICKET_KEY, RunningRunner

from weft.api.registry.v1 import model_pb2
from weft.dispatch.fleet import RunnerView
from weft.kernel.channels.rpc import open_channel
from weft_testing.conformance.findings import Finding
from weft_testing.conformance.runner_requests import Check
from weft_testing.conformance.runner_suite import CHECKS, examine
from weft_testing.conformance.runner_under_test import RunnerUnderTest

BY_NAME = {check.name: check for check in CHECKS}
ALL_OPERATIONS = frozenset({int(model_pb2.MODEL_OPERATION_CHAT), int(model_pb2.MODEL_OPERATION_EMBEDDING)})


@asynccontextmanager
async def subject(
    runner: RunningRunner,
    address: str,
    kind: type[RunnerUnderTest] = RunnerUnderTest,
    operations: frozenset[int] = ALL_OPERATIONS,
    max_requests: int = 0,
) -> AsyncIterator[RunnerUnderTest]:
    view = RunnerView(
        name="r1",
        incarnation=runner.registry.opened[-1].runner.incarnation,
        address=address,
        host=socket.gethostname(),
        runtime="fake",
        active=True,
        draining=False,
        ticket_key=TICKET_KEY,
        instances={},
        max_requests=max_requests,
    )
    async with open_channel(address) as channel:
        yield kind(view, "m", operations, channel)


async def findings_of(runner: RunnerUnderTest, checks: tuple[Check, ...] = CHECKS) -> dict[str, Finding]:
    return {finding.check: finding async for finding in examine(runner, checks)}
