"""Loads, unloads, flushes and yields as the registry asks a runner for them: permits, options, progress, results."""

from pathlib import Path
from typing import Any

import pytest
from kit.engines import fake_model
from runner_harness import events_of, ready_runner, refusal, running_runner

from runner_svc.instance.instance_settings import HibernationSettings, ServedModel
from runner_svc.policy.lifecycle import Phase
from weft.api.common.v1.priority_pb2 import PRIORITY_NORMAL, PRIORITY_UNSPECIFIED
from weft.api.runner.v1 import load_pb2, permit_pb2
from weft.api.runner.v1 import runner_service_pb2 as pb
from weft.dispatch.tickets import Action
from weft.kernel.errors.reasons import Reason


def _model(start_asleep: bool = False, **switches: Any) -> ServedModel:
    return fake_model(
        "m",
        switches,
        hibernation=HibernationSettings(start_asleep=start_asleep),
        quantizations={"q8_0": Path(__file__)},
        model_path=Path(__file__),
    )


def _options(**parameters: int) -> load_pb2.LoadOptions:
    values = {name: load_pb2.LoadValue(integer=value) for name, value in parameters.items()}
    return load_pb2.LoadOptions(parameters=values)


async def test_load_operations_require_a_registry_permit(tmp_path: Path) -> None:
    async with ready_runner(tmp_path, [_model()]) as runner:
        wrong = await runner.permit(Action.UNLOAD, "other")
        for permit in (None, wrong, permit_pb2.OperationPermit(claims=b"x", mac=b"y" * 32)):
            calls: tuple[Any, ...] = (
                runner.control.Load(pb.LoadRequest(model="m", permit=permit)).read(),
                runner.control.Unload(pb.UnloadRequest(model="m", permit=permit)),
                runner.control.YieldMemory(pb.YieldMemoryRequest(model="m", permit=permit, priority=PRIORITY_NORMAL)),
                runner.control.Describe(pb.DescribeRequest(source="/model.gguf", permit=permit)),
                runner.control.FlushCache(pb.FlushCacheRequest(scope=pb.FlushCacheRequest.SCOPE_ALL, permit=permit)),
            )
            for call in calls:
                assert (await refusal(call)).reason is Reason.PERMIT_INVALID
        assert (await runner.described()).process_id


@pytest.mark.slow("loads for seconds")
async def test_load_reports_its_progress_and_then_its_result(tmp_path: Path) -> None:
    async with running_runner(tmp_path, [_model(start_asleep=True, load_seconds=1.0)]) as runner:
        told = await runner.load()
        kinds = [response.WhichOneof("kind") for response in told]
        assert kinds[-1] == "result"
        assert set(kinds[:-1]) == {"progress"}
        assert {response.progress.stage for response in told[:-1]} <= {"loading", "starting", "waking", "hibernating"}
        assert "starting" in {response.progress.stage for response in told[:-1]}
        result = told[-1].result
        assert not result.was_loaded
        assert result.load_time.ToMilliseconds() >= 1000
        again = await runner.load()
        assert [response.result.was_loaded for response in again] == [True]
        assert not again[0].result.load_time.ToMilliseconds()
        # What is known of earlier loads is told with the next one.
        freed = await runner.unload()
        assert (freed.memory_freed_bytes, freed.cache_flushed) == (0, True)
        etas = [response.progress for response in (await runner.load())[:-1] if response.progress.HasField("eta")]
        assert etas
        assert all(progress.eta.seconds <= result.load_time.seconds + 1 for progress in etas)


async def test_load_cancelled_by_its_caller_is_unloaded(tmp_path: Path) -> None:
    async with running_runner(tmp_path, [_model(start_asleep=True, load_seconds=30.0)]) as runner:
        call: Any = runner.control.Load(pb.LoadRequest(model="m", permit=await runner.permit(Action.LOAD)))
        await runner.until(Phase.LOADING)
        call.cancel()
        await runner.until(Phase.HIBERNATING)
        assert not (await runner.described()).process_id


async def test_options_are_validated_reported_and_effective_until_the_next_load(tmp_path: Path) -> None:
    async with ready_runner(tmp_path, [_model()]) as runner:
        described = await runner.described()
        assert "context_tokens" in {parameter.name for parameter in described.load_parameters}
        assert (list(described.quantizations), described.model_path) == (["q8_0"], __file__)
        first = described.process_id
        options = _options(context_tokens=1024)
        options.keep_alive.FromSeconds(3600)
        await runner.load(options=options)
        state = await runner.until_state(
            lambda state: state.context_tokens == 1024 and state.phase == Phase.READY.value
        )
        assert state.HasField("unload_time")
        described = await runner.described()
        assert described.process_id not in (0, first)
        assert described.load_options.parameters["context_tokens"].integer == 1024
        assert described.load_options.keep_alive.seconds == 3600
        assert (await runner.load(options=_options(context_tokens=1024)))[-1].result.was_loaded
        await runner.load()
        assert not (await runner.described()).load_options.parameters


async def test_invalid_option_is_reported(tmp_path: Path) -> None:
    options, field = _options(layers=3), "options.parameters.layers"
    async with ready_runner(tmp_path, [_model()]) as runner:
        before = (await runner.described()).process_id
        permit = await runner.permit(Action.LOAD)
        error = await refusal(runner.control.Load(pb.LoadRequest(model="m", permit=permit, options=options)).read())
        assert (error.reason, error.metadata["field"]) == (Reason.INVALID_ARGUMENT, field)
        assert (await runner.described()).process_id == before


async def test_model_without_a_lease_does_not_yield_memory(tmp_path: Path) -> None:
    async with ready_runner(tmp_path, [_model()]) as runner:
        for priority, reason in ((PRIORITY_UNSPECIFIED, Reason.INVALID_ARGUMENT), (PRIORITY_NORMAL, None)):
            permit = await runner.permit(Action.YIELD)
            request = pb.YieldMemoryRequest(model="m", permit=permit, lease_id="l1", priority=priority)
            if reason is None:
                await runner.control.YieldMemory(request)
            else:
                assert (await refusal(runner.control.YieldMemory(request))).reason is reason
        assert await events_of(runner.generate(max_tokens=2))
