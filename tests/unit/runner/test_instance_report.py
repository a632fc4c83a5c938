"""The report of a model's memory, options and unload timer."""

import asyncio
from dataclasses import replace
from datetime import UTC, timedelta
from pathlib import Path

from instance_stage import Stage, living
from kit.calls import calls_of
from stepped_ledger import GIB, SteppedLedger

from runner_svc.memory.estimate import ModelFacts, read_model_facts
from runner_svc.policy.load_options import STAY_LOADED, LoadPlan, LoadSpec
from runner_svc.policy.memory_estimate import FileKind
from runner_svc.runner_config import RunnerConfig
from runner_svc.runtimes.model_engine import model_file_of
from runner_svc.servicers.control import LOOK_SECONDS, follow_load
from runner_svc.session.report import MAX_REPORTED_TOOLS, RunnerReport
from weft.api.registry.v1 import model_pb2, runner_pb2
from weft.api.runner.v1 import runner_service_pb2 as pb
from weft.kernel.requests.capabilities import UNKNOWN, Capabilities
from weft.kernel.requests.request_values import Skill
from weft_app.compose.demo import demo_model_path

MIB = 2**20
DIGEST = f"sha256:{'ab' * 32}"


def _report(stage: Stage) -> RunnerReport:
    config = RunnerConfig(name="r1", host="h", address="", registry_address="", session_file=Path("unused"), models=())
    return RunnerReport(config, "life-1", [stage.instance], lambda model: pb.CacheFigures(hit_count=len(model)))


def _state(stage: Stage) -> runner_pb2.InstanceState:
    return _report(stage).capability().instances[0]


async def test_model_memory_is_reported_as_leased_observed_and_estimated() -> None:
    async with living(SteppedLedger()) as stage:
        memory = _state(stage).memory
        assert (memory.leased_bytes, memory.estimated_bytes, memory.estimate_source) == (2 * GIB, 2 * GIB, "header")
        assert (list(memory.device_indexes), memory.HasField("measured_bytes")) == ([0], False)
        stage.instance.memory.note_memory_seen(3 * GIB)
        assert _state(stage).memory.measured_bytes == 3 * GIB
        await stage.instance.unload()
        memory = _state(stage).memory
        assert (memory.leased_bytes, list(memory.device_indexes), memory.estimated_bytes) == (0, [], 2 * GIB)
        assert not memory.HasField("measured_bytes")


async def test_model_with_unknown_memory_and_no_lease_reports_none() -> None:
    async with living() as stage:
        state = _state(stage)
        assert not state.HasField("memory")
        assert not state.HasField("unload_time")
        assert not state.HasField("load_eta")


async def test_report_says_which_models_a_followed_server_lists() -> None:
    async with living() as stage:
        assert not _state(stage).listed
        stage.instance.config = replace(stage.instance.config, server="box")
        assert _state(stage).listed


async def test_engine_main_memory_is_reported_in_steps_without_devices() -> None:
    async with living() as stage:
        stage.backend.resident = 381 * MIB
        assert _state(stage).memory == runner_pb2.InstanceMemory(resident_bytes=384 * MIB)


async def test_digest_is_published_once_known() -> None:
    """It was shown as "-" while receipts had it."""
    async with living() as stage:
        report = _report(stage)
        report.models = [stage.instance.config]
        assert report.manifests()[0].digest == ""
        stage.instance.digest = DIGEST
        assert report.manifests()[0].digest == DIGEST


async def test_file_metadata_and_a_different_quantization_are_reported() -> None:
    facts = replace(read_model_facts(demo_model_path()), architecture="llama")
    async with living(SteppedLedger()) as stage:
        assert not _state(stage).HasField("model_file")
        stage.instance.config = replace(stage.instance.config, model_file=model_file_of(facts))
        file = _state(stage).model_file
        assert (file.format, file.architecture, file.quantization) == ("gguf", "llama", "q4_1")
        assert (file.parameter_count, file.size_bytes) == (134_515_008, demo_model_path().stat().st_size)
        stage.instance.loader.plan = LoadPlan(quantization="q8_0")
        file = _state(stage).model_file
        assert (file.architecture, file.quantization, file.size_bytes) == ("llama", "q8_0", 0)


def test_architecture_that_is_not_a_plain_word_is_not_published() -> None:
    for architecture in ("two words", "x" * 65, "\x1b[31m", ""):
        assert model_file_of(ModelFacts(file_kind=FileKind.GGUF, architecture=architecture)).architecture == ""
    assert model_file_of(ModelFacts(architecture="llama")) == model_pb2.ModelFile(), "no file was read"


async def test_unload_time_is_reported_and_does_not_drift() -> None:
    async with living(SteppedLedger()) as stage:
        before = _state(stage).unload_time.ToDatetime(UTC)
        assert before == stage.clock.utc_now() + timedelta(seconds=300)
        await stage.clock.advance(10.3)
        assert _state(stage).unload_time.ToDatetime(UTC) == before, "else every look at it would be news to the mesh"
        request = await stage.request()
        assert not _state(stage).HasField("unload_time"), "it works"
        await stage.leave(request)
        assert _state(stage).unload_time.ToDatetime(UTC) > before


async def test_repeated_load_reports_an_eta() -> None:
    async with living(SteppedLedger()) as stage:
        for seconds in (8.0, 10.0, 12.0):
            await stage.instance.unload()
            stage.backend.loaded.clear()
            task = await stage.begin(stage.instance.load())
            await stage.clock.advance(seconds)
            stage.backend.loaded.set()
            await task
        await stage.instance.unload()
        assert _state(stage).usual_load.ToMilliseconds() == 9_000, "as the four loads were in the middle"
        stage.backend.loaded.clear()
        task = await stage.begin(stage.instance.load())
        first = _state(stage).load_eta.ToMilliseconds()
        await stage.clock.advance(3.0)
        assert first - _state(stage).load_eta.ToMilliseconds() == 3000
        await stage.clock.advance(100.0)
        assert _state(stage).load_eta.ToMilliseconds() == 0
        assert _state(stage).HasField("load_eta")
        stage.backend.loaded.set()
        await task


async def test_load_options_are_described() -> None:
    wish = LoadSpec(
        plan=LoadPlan(parameters={"context_tokens": 4096, "draft": 0.5, "attention": "on", "mlock": True}),
        keep_alive_seconds=60.0,
        pin=True,
    )
    async with living(SteppedLedger()) as stage:
        await stage.instance.load(wish)
        described = _report(stage).describe(0).instances[0]
        options = described.load_options
        values = {name: getattr(value, value.WhichOneof("kind") or "") for name, value in options.parameters.items()}
        assert values == {"context_tokens": 4096, "draft": 0.5, "attention": "on", "mlock": True}
        assert (options.keep_alive.seconds, options.pin, _state(stage).pinned) == (60, True, True)
        assert described.cache.hit_count == 1
        assert described.cache_isolation == pb.CACHE_ISOLATION_NONE


async def test_load_wait_reason_is_reported_without_repeating_that_it_waits() -> None:
    book, told = SteppedLedger(), list[pb.LoadResponse]()
    async with living(book, start_asleep=True) as stage:

        async def follow() -> None:
            async for response in follow_load(stage.instance, STAY_LOADED, stage.clock, str):
                told.append(response)

        book.go.clear()
        following = asyncio.create_task(follow())
        for _ in range(2):
            await stage.settle()
            await stage.clock.advance(LOOK_SECONDS)
        await stage.settle()
        book.go.set()
        await stage.settle()
        await following
    words = {response.progress.stage: response.progress.detail for response in told[:-1]}
    assert words["waiting for memory"] == "needs 2.0 GiB on host-a, held by qwen"


async def test_currently_callable_tools_are_reported_up_to_a_bound() -> None:
    names = [f"files.tool-{number:04}" for number in range(MAX_REPORTED_TOOLS)]
    config = RunnerConfig(name="r1", host="h", address="", registry_address="", session_file=Path("unused"), models=())
    report = RunnerReport(config, "life-1", [], tool_names=lambda: tuple(names))
    assert list(report.capability().tool_names) == names
    names.append("web.search")
    assert len(report.capability().tool_names) == MAX_REPORTED_TOOLS
    names.clear()
    assert not report.capability().tool_names


async def test_pinned_model_is_reported_immediately_and_once() -> None:
    """A router that does not know of the pin would plan its eviction, and the other load would wait in vain."""
    async with living(SteppedLedger()) as stage:
        stage.told.clear()
        await stage.instance.load(LoadSpec(plan=stage.instance.plan, pin=True))
        assert (len(stage.told), _state(stage).pinned) == (1, True)
        await stage.instance.load(LoadSpec(plan=stage.instance.plan, pin=True))
        assert len(stage.told) == 1
        await stage.instance.load(LoadSpec(plan=stage.instance.plan))
        assert (len(stage.told), _state(stage).pinned) == (2, False)


async def test_abilities_follow_each_of_their_sources_and_are_merged_once() -> None:
    async with living() as stage:
        loader, image = stage.instance.loader, Capabilities(skills=frozenset({Skill.IMAGE}))
        assert loader.capabilities == UNKNOWN
        loader.config = replace(loader.config, capabilities=image)
        assert loader.capabilities == image
        loader.config = replace(loader.config, declared_capabilities=Capabilities(lacking=frozenset({Skill.IMAGE})))
        assert loader.capabilities == Capabilities(lacking=frozenset({Skill.IMAGE}))
        assert "known_capabilities" not in calls_of(lambda: loader.capabilities)
