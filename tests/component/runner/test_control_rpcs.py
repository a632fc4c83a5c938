"""The runner's control plane over gRPC, and its limit over all models."""

import asyncio
from pathlib import Path
from typing import Any

import grpc
import pytest
from kit.engines import fake_engine, fake_model
from kit.own_children import own_children
from runner_harness import events_of, ready_runner, refusal, running_runner

from runner_svc.instance.instance_settings import ServedModel
from runner_svc.policy.lifecycle import Phase
from runner_svc.runtimes.llama_server.llama_server_backend import LlamaServerBackend
from weft.api.runner.v1 import runner_service_pb2 as pb
from weft.kernel.errors.reasons import Reason


async def test_unknown_model_is_not_found(tmp_path: Path) -> None:
    async with running_runner(tmp_path, [fake_model()]) as runner:
        tail = runner.control.TailLogs(pb.TailLogsRequest(model="other"))
        for call in (runner.wake("other"), runner.load("other"), runner.unload("other"), tail.read()):
            assert (await refusal(call)).reason is Reason.MODEL_NOT_FOUND


async def test_last_log_lines_come_first_and_then_the_new_ones(tmp_path: Path) -> None:
    async with ready_runner(tmp_path, [fake_model()]) as runner:
        once = runner.control.TailLogs(pb.TailLogsRequest(model="m", line_count=1000))
        lines = [line for response in [batch async for batch in once] for line in response.lines]
        assert any("listening on" in line for line in lines)
        following: Any = runner.control.TailLogs(pb.TailLogsRequest(model="m", line_count=1, follow=True))
        assert list((await following.read()).lines) == lines[-1:]
        await runner.unload()
        await runner.load()
        async with asyncio.timeout(10.0):
            while not any("listening on" in line for line in (await following.read()).lines):
                pass
        following.cancel()


async def test_runner_hides_engine_addresses_if_configured(tmp_path: Path) -> None:
    async with ready_runner(tmp_path, [fake_model()], conceals_local_addresses=True) as runner:
        described = (await runner.control.Describe(pb.DescribeRequest(log_line_count=1000))).instances[0].log_lines
        tail: Any = runner.control.TailLogs(pb.TailLogsRequest(model="m", line_count=1000, follow=True))
        told = list((await tail.read()).lines)
        await runner.unload()
        await runner.load()
        later: list[str] = []
        async with asyncio.timeout(10.0):
            while not any("listening on" in line for line in later):
                later += (await tail.read()).lines
        tail.cancel()
        for lines in (described, told, later):
            assert "listening on <local>" in "\n".join(lines)
            assert "127.0.0.1" not in "\n".join(lines)


async def test_output_of_a_dead_engine_is_in_its_log_only_without_addresses(tmp_path: Path) -> None:
    model = fake_model(engine={"command": ("/bin/sh", "-c", "echo lost http://127.0.0.1:41045; exit 3")})
    async with running_runner(tmp_path, [model], conceals_local_addresses=True) as runner:
        state = await runner.until(Phase.CRASH_LOOP)
        assert "lost" not in state.detail
        described = (await runner.control.Describe(pb.DescribeRequest(log_line_count=10))).instances[0]
        assert "lost" not in described.last_restart_reason
        assert "lost <local>" in described.log_lines


@pytest.mark.parametrize("count", [-1, 1001])
async def test_out_of_range_line_count_is_reported(count: int, tmp_path: Path) -> None:
    async with running_runner(tmp_path, [fake_model()]) as runner:
        error = await refusal(runner.control.TailLogs(pb.TailLogsRequest(model="m", line_count=count)).read())
        assert error.metadata["field"] == "line_count"


async def test_stop_ends_log_readers(tmp_path: Path) -> None:
    async with ready_runner(tmp_path, [fake_model()]) as runner:
        following: Any = runner.control.TailLogs(pb.TailLogsRequest(model="m", line_count=1, follow=True))
        async with asyncio.timeout(10.0):
            assert (await following.read()).lines
            await runner.service.stop(0.0)
            while await following.read() is not grpc.aio.EOF:
                pass


async def test_request_limit_applies_across_all_models(tmp_path: Path) -> None:
    slow = {"answer_tokens": 0, "tokens_per_second": 20}
    async with running_runner(tmp_path, [fake_model("a", slow), fake_model("b", slow)], max_requests=1) as runner:
        await runner.until(Phase.READY, "a")
        await runner.until(Phase.READY, "b")
        assert runner.registry.capability.max_requests == 1
        first = runner.generate(model="a", max_tokens=2000)
        await first.read()
        refused = await refusal(events_of(runner.generate(model="b")))
        assert refused.reason is Reason.NO_SLOT_AVAILABLE
        first.cancel()
        await runner.until_idle("a")
        assert await events_of(runner.generate(model="b", max_tokens=3))


class StubbornBackend(LlamaServerBackend):
    async def stop(self) -> None:
        await super().stop()
        raise RuntimeError("I do not want to")


async def test_model_with_a_failing_stop_does_not_block_the_others(tmp_path: Path) -> None:
    engine = fake_engine(name="stubborn")
    stubborn = ServedModel(name="stubborn", make_backend=lambda: StubbornBackend(engine.model, engine.context))
    async with running_runner(tmp_path, [stubborn, fake_model()]) as runner:
        await runner.until(Phase.READY, "stubborn")
        await runner.until(Phase.READY)
        await runner.service.stop(0.0)
        assert not own_children(recursive=True)
