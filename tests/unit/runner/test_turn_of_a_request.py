"""One turn of an admitted request: the end of its use of the prefix cache, and its warnings."""

from collections.abc import AsyncGenerator
from typing import Any, cast

import pytest

from runner_svc.backend.port import Backend, CallInfo
from runner_svc.cache.model_cache import RequestCache, RunningTurn
from runner_svc.instance.admission import AdmittedRequest
from runner_svc.memory.device_meter import DeviceMeter, RequestMeter
from runner_svc.policy.engine_blocks import PromptPrefixes
from runner_svc.request_records import RequestRecord
from weft.api.common.v1 import chat_pb2, event_pb2, receipt_pb2, warning_pb2
from weft.api.registry.v1.lease_pb2 import DeviceBytes, Lease
from weft.dispatch.frames import Frame, GenerationPayload
from weft.kernel.errors.error_tree import WeftError
from weft.kernel.errors.reasons import Reason
from weft.kernel.requests.capabilities import UNKNOWN, Capabilities, ThinkingMode
from weft_testing.fake_clock import FakeClock

Event = event_pb2.InferenceEvent
TEXT: Frame = [Event(delta=event_pb2.Delta(text="Hi."))]
LAST: Frame = [Event(finished=event_pb2.Finished(receipt=receipt_pb2.Receipt()))]
ALWAYS_THINKS = Capabilities(thinking_modes=frozenset({ThinkingMode.DEFAULT, ThinkingMode.ENABLED}))
UNTAKEN = warning_pb2.Warning(
    code=warning_pb2.WARNING_CODE_UNSUPPORTED_PARAMETER, field="reasoning_effort", message="is not taken"
)


class ScriptedEngine:
    def __init__(self, *frames: Frame, fails: bool = False) -> None:
        self._frames = frames
        self._fails = fails

    async def generate(self, payload: GenerationPayload, call: CallInfo) -> AsyncGenerator[Frame]:
        for frame in self._frames:
            yield frame
        if self._fails:
            raise WeftError(Reason.SERVER_DIED, "gone")


class HeldPrefix:
    """The use of a prefix cache: whether a turn holds a prefix now."""

    def __init__(self) -> None:
        self.is_held = False
        self.turn = RunningTurn(on_end=self._release)

    async def generating(self, payload: GenerationPayload, prefixes: PromptPrefixes | None = None) -> RunningTurn:
        self.is_held = True
        return self.turn

    async def _release(self, is_complete: bool) -> None:
        self.is_held = False

    def note_turn(self, turn: RunningTurn, receipt: receipt_pb2.Receipt) -> None:
        pass


def _request(engine: ScriptedEngine, prefix: HeldPrefix, capabilities: Capabilities = UNKNOWN) -> AdmittedRequest:
    clock = FakeClock()
    record = RequestRecord(
        request_id="req-1", model="m", clock=clock, started=0.0, started_at=clock.utc_now(), last_progress=0.0
    )
    return AdmittedRequest(
        record, cast("Backend", engine), lambda _: None, cast("RequestCache", cast("Any", prefix)), capabilities
    )


def _turn(request: AdmittedRequest, **fields: Any) -> AsyncGenerator[Frame]:
    return request.generate(chat_pb2.ChatPayload(**fields), CallInfo(request_id="req-1", traceparent=""))


async def test_last_frame_of_an_answer_is_sent_after_its_turn_ended() -> None:
    prefix = HeldPrefix()
    held = [(frame, prefix.is_held) async for frame in _turn(_request(ScriptedEngine(TEXT, LAST), prefix))]
    assert held == [(TEXT, True), (LAST, False)]


class ReportingEngine(ScriptedEngine):
    """Notes whether the turn has begun: before its first warning, after it, and after its report on the prompt."""

    def __init__(self, prefix: HeldPrefix, *, reports: bool) -> None:
        super().__init__()
        self._prefix, self._reports = prefix, reports
        self.begun: list[bool] = []

    async def generate(self, payload: GenerationPayload, call: CallInfo) -> AsyncGenerator[Frame]:
        self.begun.append(self._prefix.turn.begun.is_set())
        yield [Event(warning=UNTAKEN)]
        self.begun.append(self._prefix.turn.begun.is_set())
        if self._reports:
            call.on_prefill()
            self.begun.append(self._prefix.turn.begun.is_set())
        yield TEXT
        self.begun.append(self._prefix.turn.begun.is_set())


@pytest.mark.parametrize("reports", [True, False])
async def test_turn_has_begun_with_the_first_report_on_its_prompt_or_the_first_token(reports: bool) -> None:
    prefix = HeldPrefix()
    engine = ReportingEngine(prefix, reports=reports)
    assert [frame async for frame in _turn(_request(engine, prefix))] == [[Event(warning=UNTAKEN)], TEXT]
    assert engine.begun == [False, False, *([True] if reports else []), True]


async def test_abandoned_or_failed_turn_ends_too() -> None:
    prefix = HeldPrefix()
    left = _turn(_request(ScriptedEngine(TEXT, LAST), prefix))
    assert await anext(left) == TEXT
    await left.aclose()
    assert not prefix.is_held
    broken = _turn(_request(ScriptedEngine(TEXT, fails=True), prefix))
    assert await anext(broken) == TEXT
    with pytest.raises(WeftError, match="gone"):
        await anext(broken)
    assert not prefix.is_held


async def _warned(capabilities: Capabilities, *frames: Frame) -> list[str]:
    turn = _turn(
        _request(ScriptedEngine(*frames), HeldPrefix(), capabilities), reasoning_effort=chat_pb2.REASONING_EFFORT_NONE
    )
    return [event.warning.message async for frame in turn for event in frame if event.HasField("warning")]


async def test_unsupported_effort_is_warned_about_once_with_the_reason() -> None:
    other = warning_pb2.Warning(code=warning_pb2.WARNING_CODE_UNSUPPORTED_PARAMETER, field="seed", message="no seed")
    frames: list[Frame] = [[Event(warning=UNTAKEN), Event(warning=other)], [Event(warning=UNTAKEN)], TEXT, LAST]
    why = "reasoning_effort: none was ignored: the model does not answer without thinking"
    assert await _warned(ALWAYS_THINKS, *frames) == [why, "no seed"]
    assert await _warned(UNKNOWN, *frames) == ["is not taken", "no seed", "is not taken"], "the engine's own stay"


def _metered(engine: ScriptedEngine) -> tuple[AdmittedRequest, DeviceMeter]:
    clock = FakeClock()
    record = RequestRecord(
        request_id="req-1", model="m", clock=clock, started=0.0, started_at=clock.utc_now(), last_progress=0.0
    )
    meter = DeviceMeter(clock)
    grant = Lease(lease_id="a", shares=[DeviceBytes(device_index=0, bytes=1)])
    request_meter = RequestMeter(meter, "m", lambda: grant)
    return AdmittedRequest(record, cast("Backend", engine), lambda _: None, meter=request_meter), meter


async def test_turn_is_metered_until_its_engine_ends_in_any_way() -> None:
    request, meter = _metered(ScriptedEngine(TEXT, LAST))
    said = [(frame, meter.called.is_set()) async for frame in _turn(request)]
    assert said == [(TEXT, True), (LAST, False)], "the receipt comes with the share of the whole turn"
    receipt = receipt_pb2.Receipt()
    request.note_device_usage(receipt)
    assert receipt.device_usage.gap == receipt_pb2.DeviceUsage.GAP_NOT_SAMPLED
    left, meter = _metered(ScriptedEngine(TEXT, LAST))
    turn = _turn(left)
    await anext(turn)
    await turn.aclose()
    assert not meter.called.is_set()
    broken, meter = _metered(ScriptedEngine(TEXT, fails=True))
    with pytest.raises(WeftError, match="gone"):
        _ = [frame async for frame in _turn(broken)]
    assert not meter.called.is_set()


async def test_request_without_a_meter_has_no_device_usage() -> None:
    request = _request(ScriptedEngine(TEXT, LAST), HeldPrefix())
    _ = [frame async for frame in _turn(request)]
    receipt = receipt_pb2.Receipt()
    request.note_device_usage(receipt)
    assert not receipt.HasField("device_usage")
