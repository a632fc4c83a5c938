"""The backend suite's checks of load orders find the backends that they are there to find.

`test_backend_conformance` has the backend that passes them.
"""

from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import pytest
from kit.engine_settings import engine_settings
from kit.warm_python import warm

from runner_svc.backend.port import BackendFacts, LoadOrder
from runner_svc.policy.timeouts import StopGraces
from runner_svc.runtimes.llama_server.llama_server_backend import LlamaServerBackend
from runner_svc.runtimes.llama_server.runtime import LlamaServerModel
from weft.gpu.snapshot import ProcessId
from weft_testing.conformance.backend import Engine, LoadOrderChecks
from weft_testing.fake_backend.process import fake_backend_command

pytestmark = pytest.mark.slow("starts up to three engines per check")

PROGRAM = warm("weft_testing.fake_backend")


class DeafBackend(LlamaServerBackend):
    """A backend that ignores the order of a load."""

    async def start(self, order: LoadOrder | None = None) -> BackendFacts:
        del order
        return await super().start()


class BoastfulBackend(LlamaServerBackend):
    """A backend that keeps the parameters of an order for the next load."""

    asked_for = 0

    async def start(self, order: LoadOrder | None = None) -> BackendFacts:
        facts = await super().start(order)
        if order is not None and "context_tokens" in order.parameters:
            self.asked_for = int(order.parameters["context_tokens"])
        return replace(facts, context_tokens=self.asked_for or facts.context_tokens)


class BlindBackend(LlamaServerBackend):
    """Knows of its first process alone."""

    def processes(self) -> tuple[ProcessId, ...]:
        return tuple(one for one in super().processes() if one.pid == self.process_id)


class ForgetfulBackend(LlamaServerBackend):
    """A backend that reports ended processes."""

    seen: tuple[ProcessId, ...] = ()

    def processes(self) -> tuple[ProcessId, ...]:
        self.seen = super().processes() or self.seen
        return self.seen


class _Suite(LoadOrderChecks):
    def __init__(self, kind: type[LlamaServerBackend]) -> None:
        self._kind = kind
        self.made: list[LlamaServerBackend] = []

    def make_variant(self) -> Path:
        return Path(__file__).with_name("test_placement_conformance.py")

    def make_backend(self, engine: Engine) -> LlamaServerBackend:
        command = fake_backend_command(fork_grandchild=engine is Engine.WITH_DESCENDANT)
        config = engine_settings(
            LlamaServerModel,
            # Of the warm server: how this program starts is not the subject here.
            command=(*PROGRAM, *command[len(PROGRAM) :]),
            path=Path(__file__),
            name="fake",
            graces=StopGraces(first_term_seconds=0.5),
        )
        self.made.append(self._kind(*config))
        return self.made[-1]


@asynccontextmanager
async def _suite(kind: type[LlamaServerBackend]) -> AsyncGenerator[_Suite]:
    suite = _Suite(kind)
    try:
        yield suite
    finally:
        for backend in suite.made:
            await backend.stop()


@pytest.mark.parametrize(
    ("kind", "check"),
    [
        (DeafBackend, "test_a_load_parameter_holds_for_one_load"),
        (DeafBackend, "test_a_parameter_that_is_not_declared_starts_nothing"),
        (DeafBackend, "test_a_parameter_beyond_its_range_starts_nothing"),
        (DeafBackend, "test_an_order_loads_the_variant_that_it_names"),
        (BoastfulBackend, "test_a_load_parameter_holds_for_one_load"),
        (BlindBackend, "test_processes_lists_every_process_of_the_engine"),
        (ForgetfulBackend, "test_processes_lists_every_process_of_the_engine"),
    ],
)
async def test_conformance_suite_detects_a_backend_with_wrong_load_behavior(
    kind: type[LlamaServerBackend], check: str
) -> None:
    async with _suite(kind) as suite:
        with pytest.raises(AssertionError):
            await getattr(suite, check)()
