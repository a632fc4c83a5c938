"""Events of an engine's prefix cache over real sockets: what the runner knows, and forgets when reports are missing."""

import asyncio
import logging
import stat
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing, asynccontextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest
from kit.block_publisher import CLEARED, BlockPublisher, publisher, removed, stored
from kit.engine_settings import engine_settings
from kit.engines import GRACES, chat, control_of, started
from kit.failures import fails
from server_dialects import preset_settings, server_settings

from runner_svc.backend.port import CallInfo
from runner_svc.backend.prefix_reports import PrefixReports
from runner_svc.policy.cache_directory import Partition
from runner_svc.policy.engine_blocks import PromptPrefixes
from runner_svc.runtimes import kv_events
from runner_svc.runtimes.kv_events import FLAG, BlockEvents
from runner_svc.runtimes.server.server_backend import ServerBackend
from runner_svc.runtimes.vllm.runtime import VllmModel
from runner_svc.runtimes.vllm.vllm_backend import VllmBackend
from weft.api.common.v1 import event_pb2
from weft.api.runner.v1 import runner_service_pb2 as pb
from weft.dispatch.frames import Frame
from weft.kernel.errors.reasons import Reason
from weft.kernel.telemetry.structured_logs import new_traceparent
from weft_testing.fake_backend.process import fake_backend_command

ANY = Partition("t")


def _prompt(*digests: int) -> PromptPrefixes:
    return PromptPrefixes(digests, 1_024 * len(digests), ANY)


async def _answered(reports: PrefixReports, request_id: str, prompt: PromptPrefixes) -> None:
    """Serves a request whose prompt has 256 tokens for each digest."""

    async def frames() -> AsyncGenerator[Frame]:
        finished = event_pb2.Finished()
        finished.receipt.usage.prompt_tokens = 256 * len(prompt.digests)
        yield [event_pb2.InferenceEvent(finished=finished)]

    async for _ in reports.attributed(frames(), request_id, prompt):
        pass


@asynccontextmanager
async def _followed() -> AsyncGenerator[tuple[PrefixReports, BlockPublisher, BlockEvents]]:
    reports = PrefixReports()
    events = await BlockEvents.begin(reports, "m")
    try:
        async with publisher(events.arguments) as engine:
            yield reports, engine, events
    finally:
        await events.end()


async def _until(holds: Callable[[], bool]) -> None:
    for _ in range(2_000):
        if holds():
            return
        await asyncio.sleep(0.005)
    raise AssertionError("it did not happen within 10 s")


async def test_prefix_is_held_once_stored_and_not_once_removed() -> None:
    async with _followed() as (reports, engine, _):
        assert not reports.is_live, "the engine has reported nothing yet"
        await _answered(reports, "r", _prompt(1, 2))
        await engine.publish(
            stored(b"\x01", b"\x02", session="r"), stored(b"\x03", b"\x04", parent=b"\x02", session="r")
        )
        await _until(lambda: reports.is_live and reports.prefixes == [1, 2])
        await engine.publish(removed(b"\x04"))
        await _until(lambda: reports.prefixes == [1])


async def test_missed_batches_are_requested_again() -> None:
    async with _followed() as (reports, engine, _):
        for request in "abc":
            await _answered(reports, request, _prompt(ord(request)))
        await engine.publish(stored(1, 2, session="a"), lost=True)
        await engine.publish(stored(3, 4, session="b"), lost=True)
        await engine.publish(stored(5, 6, session="c"))
        await _until(lambda: reports.prefixes == [ord(each) for each in "abc"])
        await engine.publish(removed(1), lost=True)
        await engine.publish(removed(3))
        await _until(lambda: reports.prefixes == [ord("c")])


async def test_batches_that_the_engine_has_dropped_make_everything_unknown() -> None:
    async with _followed() as (reports, engine, _):
        await _answered(reports, "a", _prompt(1))
        await engine.publish(stored(1, 2, session="a"))
        await _until(lambda: reports.prefixes == [1])
        await engine.publish(removed(1), lost=True)
        engine.kept.clear()
        await _answered(reports, "b", _prompt(2))
        await engine.publish(stored(3, 4, session="b"))
        await _until(lambda: reports.prefixes == [2])
        assert reports.is_live


async def test_engine_that_repeats_nothing_is_not_waited_for_long(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kv_events, "REPEAT_SECONDS", 0.05)
    async with _followed() as (reports, engine, _):
        engine._repeating.cancel()
        await _answered(reports, "b", _prompt(2))
        engine.next_number = 7
        await engine.publish(stored(3, 4, session="b"))
        await _until(lambda: reports.prefixes == [2])


@pytest.mark.parametrize(
    "batch", [b"", b"\xc1", b"\x93\xcb?\xf0\x00\x00\x00\x00\x00\x00\x91\xa3odd\xc0", bytes(4_096), b"\x91" * 4_096]
)
async def test_malformed_batch_makes_everything_unknown_and_the_next_one_counts(batch: bytes) -> None:
    async with _followed() as (reports, engine, _):
        await _answered(reports, "a", _prompt(1))
        await engine.publish(stored(1, 2, session="a"))
        await _until(lambda: reports.prefixes == [1])
        await engine.send(batch)
        await _answered(reports, "b", _prompt(2))
        await engine.publish(stored(3, 4, session="b"))
        await _until(lambda: reports.prefixes == [2])


async def test_messages_of_another_form_end_the_reports() -> None:
    async with _followed() as (reports, engine, _):
        await engine.publish(stored(1, 2, session="r"))
        await _until(lambda: reports.is_live)
        for _ in range(kv_events.MAX_MALFORMED):
            await engine.send_frames(b"\x00")
        await _until(lambda: not reports.is_live)


async def test_message_of_another_form_takes_no_number() -> None:
    async with _followed() as (reports, engine, _):
        await engine.publish(stored(1, 2, session="x"))
        await engine.send_frames(b"\x00", b"", b"")
        await _answered(reports, "r", _prompt(1))
        await engine.publish(stored(3, 4, session="r"))
        await _until(lambda: reports.prefixes == [1])


async def test_other_topics_other_caches_and_later_fields_are_ignored() -> None:
    async with _followed() as (reports, engine, _):
        await _answered(reports, "r", _prompt(1))
        await engine.send(b"not for this runner", topic=b"other")
        engine.next_number = 0
        await engine.publish(stored(1, 2, session="r", medium="CPU"), stored(1, 2, session="r", block_size=0))
        await engine.publish(stored(1, 2, session="r", group_idx=0, news={"a": [1]}), removed(2, medium="STORAGE"))
        await _until(lambda: reports.prefixes == [1])


async def test_engine_that_does_not_say_which_request_stored_a_block_is_estimated() -> None:
    async with _followed() as (reports, engine, _):
        await _answered(reports, "r", _prompt(1))
        await engine.publish(stored(1, 2), removed(1))
        await engine.publish(stored(3, 4, session="r"))
        await _until(lambda: reports.is_live)
        assert reports.prefixes == [1]


async def test_cache_of_several_groups_is_estimated() -> None:
    """Sliding windows are evicted independently of the rest."""
    async with _followed() as (reports, engine, _):
        await engine.publish(stored(1, 2, session="r"))
        await _until(lambda: reports.is_live)
        await engine.publish(stored(3, 4, group_idx=1))
        await _until(lambda: not reports.is_live)


async def test_publisher_that_is_gone_makes_everything_unknown() -> None:
    async with _followed() as (reports, engine, _):
        await _answered(reports, "r", _prompt(1))
        await engine.publish(stored(1, 2, session="r"))
        await _until(lambda: reports.prefixes == [1])
        await engine.close()
        await _until(lambda: not reports.is_live)
        assert reports.prefixes == []


async def test_flood_of_batches_is_followed_in_order() -> None:
    async with _followed() as (reports, engine, _):
        await _answered(reports, "r", _prompt(1))
        for number in range(3_000):
            await engine.publish(stored(number, number + 1_000_000), removed(number))
        await engine.publish(stored(b"a", b"b", session="r"))
        await _until(lambda: reports.prefixes == [1])


async def test_follower_gets_what_is_held_then_the_changes_until_the_end() -> None:
    async with _followed() as (reports, engine, events):
        with fails(Reason.UNSUPPORTED_OPERATION), reports.follow():
            pass
        await _answered(reports, "a", _prompt(1))
        await engine.publish(stored(1, 2, session="a"))
        await _until(lambda: reports.prefixes == [1])
        with reports.follow() as follower:
            async with aclosing(follower.messages()) as messages:
                first = await anext(messages)
                assert first == pb.WatchPrefixesResponse(restart=True, held=[1])
                await engine.publish(removed(1))
                assert [*(await anext(messages)).lost] == [1]
                await engine.publish(CLEARED)
                assert (await anext(messages)).cleared
                await events.end()
                assert [each async for each in messages] == []


def test_slow_follower_starts_again(monkeypatch: pytest.MonkeyPatch) -> None:
    from runner_svc.backend import prefix_reports  # noqa: PLC0415
    from runner_svc.policy.engine_blocks import PrefixChanges  # noqa: PLC0415

    monkeypatch.setattr(prefix_reports, "MAX_PREFIXES", 4)
    follower, reports = prefix_reports.PrefixFollower([1]), PrefixReports()
    for number in range(20):
        follower.offer(PrefixChanges(held={number: False}), reports)
    assert len(follower._changes.held) <= 8
    assert follower._changes.restart


def _backend(**settings: Any) -> VllmBackend:
    settings = {"name": "smol", "model": "org/model", "load_stall_seconds": 10.0, "graces": GRACES, **settings}
    return VllmBackend(*engine_settings(VllmModel, command=tuple(fake_backend_command()), **settings))


def _arguments(backend: VllmBackend | ServerBackend) -> list[str]:
    return psutil.Process(backend.process_id).cmdline()


async def test_vllm_reports_the_blocks_of_each_request_on_a_private_socket() -> None:
    backend = _backend(kv_events=True)
    async with started(backend, None), publisher(_arguments(backend)) as engine:
        arguments = _arguments(backend)
        sockets = list(
            Path(arguments[arguments.index(FLAG) + 1].split('"endpoint":"ipc://')[1].split('"')[0]).parent.iterdir()
        )
        assert stat.S_IMODE(sockets[0].parent.stat().st_mode) == 0o700
        assert backend.prefix_reports is not None
        call = CallInfo(request_id="r7", traceparent=new_traceparent(), prefixes=PromptPrefixes((5,), 40_000, ANY))
        async with asyncio.timeout(10.0):
            frames = [frame async for frame in backend.generate(chat(), call)]
        assert frames[-1][-1].finished.receipt.usage.prompt_tokens
        await engine.publish(stored(1, session="r7"))
        await _until(lambda: backend.prefix_reports is not None and backend.prefix_reports.prefixes == [5])
        assert await backend.sleep() is False
    assert not backend.prefix_reports.is_live
    assert not sockets[0].parent.exists()


async def test_vllm_starts_without_the_library(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kv_events, "find_spec", lambda _: None)
    backend = _backend(kv_events=True)
    async with started(backend, None):
        assert FLAG not in _arguments(backend)


async def test_vllm_starts_with_a_long_path_of_temporary_files(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(kv_events, "MAX_ADDRESS_BYTES", 10)
    backend = _backend(kv_events=True)
    with caplog.at_level(logging.WARNING):
        async with started(backend, None):
            assert FLAG not in _arguments(backend)


async def test_program_of_the_sglang_preset_gets_the_flag_and_reports_on_sockets_of_its_own() -> None:
    backend = ServerBackend(*preset_settings("sglang", kv_events=True))
    async with started(backend), publisher(_arguments(backend)) as engine:
        assert backend.prefix_reports is not None
        call = CallInfo(request_id="r8", traceparent=new_traceparent(), prefixes=PromptPrefixes((5,), 40_000, ANY))
        async with asyncio.timeout(10.0):
            frames = [frame async for frame in backend.generate(chat(), call)]
        assert frames[-1][-1].HasField("finished")
        async with control_of(backend) as control:
            assert (await control.state()).last_request_body["session_id"] == "r8"
        await engine.publish(stored(1, session="r8", cache_salt="5a"))
        await _until(lambda: backend.prefix_reports is not None and backend.prefix_reports.prefixes == [5])


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"preset": "sglang", "model": "m"}, True),
        ({"preset": "sglang", "model": "m", "kv_events": False}, False),
        ({"preset": "sglang", "model": "m", "extra_arguments": ("--dp-size", "2")}, False),
        ({"preset": "sglang", "model": "m", "command": ("sglang", "{model}", "--port", "{port}")}, False),
        ({"preset": "tgi", "model": "m"}, False),
    ],
)
def test_only_known_command_lines_get_the_flag(settings: dict[str, Any], expected: bool) -> None:
    assert ServerBackend(*server_settings(**settings)).reports_blocks is expected
