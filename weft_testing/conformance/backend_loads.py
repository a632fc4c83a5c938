"""What every Backend must do with the order of one load; a part of the backend suite."""
# ruff: noqa: D102 (test names are sentences)

import psutil

from weft.kernel.reasons import Reason
from weft.kernel.request import Operation
from weft_testing.conformance.backend_port import Backend, Engine, Order
from weft_testing.conformance.backend_runs import BackendRuns
from weft_testing.conformance.backend_steps import failure, no_process_left

ORDERED_CONTEXT_TOKENS = 512
"""Of one slot; what llama.cpp can give without rounding, and no engine of the suite is configured with."""


class LoadOrderChecks(BackendRuns):
    """Parameters, variants and processes."""

    async def test_a_load_parameter_holds_for_one_load(self) -> None:
        backend = self.make_backend(Engine.NORMAL)
        order = Order(parameters={"context_tokens": ORDERED_CONTEXT_TOKENS})
        if "context_tokens" not in {parameter.name for parameter in backend.load_parameters}:
            assert await failure(backend.start(order)) is Reason.INVALID_ARGUMENT
            return
        usual = (await self._start(backend)).context_tokens
        await self._stop(backend)
        ordered = await self._start(backend, order)
        await self._stop(backend)
        assert usual != ORDERED_CONTEXT_TOKENS, "nothing could be seen to change"
        assert ordered.context_tokens == ORDERED_CONTEXT_TOKENS
        assert (await self._start(backend)).context_tokens == usual, "the next load is as configured again"
        await self._stop(backend)

    async def test_a_parameter_that_is_not_declared_starts_nothing(self) -> None:
        backend = self.make_backend(Engine.NORMAL)
        async with no_process_left(self.notice_seconds) as new_processes:
            for name in ("no_such_parameter", "--port", ""):
                assert await failure(backend.start(Order(parameters={name: 1}))) is Reason.INVALID_ARGUMENT
                assert not new_processes()

    async def test_a_parameter_beyond_its_range_starts_nothing(self) -> None:
        backend = self.make_backend(Engine.NORMAL)
        async with no_process_left(self.notice_seconds) as new_processes:
            for parameter in backend.load_parameters:
                if parameter.maximum is not None:
                    order = Order(parameters={parameter.name: parameter.maximum + 1})
                    assert await failure(backend.start(order)) is Reason.INVALID_ARGUMENT, parameter.name
                    assert not new_processes()

    async def test_a_variant_is_loaded_where_the_order_names_one(self) -> None:
        variant = self.make_variant()
        backend = self.make_backend(Engine.NORMAL)
        facts = await self._start(backend, Order(model_path=variant))
        assert Operation.CHAT in facts.operations
        assert str(variant) in _command_line(backend)
        await self._stop(backend)
        await self._start(backend)
        assert str(variant) not in _command_line(backend), "the next load is as configured again"
        await self._stop(backend)

    async def test_the_processes_of_an_engine_are_all_that_it_runs(self) -> None:
        async with self._running(Engine.WITH_DESCENDANT) as (backend, _):
            assert backend.process_id is not None
            engine = psutil.Process(backend.process_id)
            seen = {process.pid: process.start_ticks for process in backend.processes()}
            assert set(seen) == {engine.pid, *(child.pid for child in engine.children(recursive=True))}
            assert len(seen) > 1, "this engine was to have a child process"
            assert all(ticks > 0 for ticks in seen.values())
            assert seen == {process.pid: process.start_ticks for process in backend.processes()}
            await self._stop(backend)
            assert not backend.processes()


def _command_line(backend: Backend) -> str:
    assert backend.process_id is not None
    return " ".join(psutil.Process(backend.process_id).cmdline())
