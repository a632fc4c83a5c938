"""The facts of a receipt in headers: the time on accelerators has a source, and what is unknown is left out."""

import pytest

from gateway.answers.sse import receipt_facts
from weft.api.common.v1.priority_pb2 import PRIORITY_LOW
from weft.api.common.v1.receipt_pb2 import DeviceUsage, Receipt


def _gpu(receipt: Receipt) -> dict[bytes, bytes]:
    return {name: value for name, value in receipt_facts(receipt) if name.startswith(b"x-gpu-")}


def _receipt(*, engine_ms: int | None, device_ms: int | None, energy: int | None = None) -> Receipt:
    receipt = Receipt()
    if engine_ms is not None:
        receipt.gpu_time.FromMilliseconds(engine_ms)
    if device_ms is not None:
        receipt.device_usage.device_time.FromMilliseconds(device_ms)
    if energy is not None:
        receipt.device_usage.energy_millijoules = energy
    return receipt


@pytest.mark.parametrize(
    ("receipt", "facts"),
    [
        (_receipt(engine_ms=None, device_ms=None), {}),
        (_receipt(engine_ms=450, device_ms=None), {b"x-gpu-time-ms": b"450", b"x-gpu-time-source": b"engine"}),
        (_receipt(engine_ms=450, device_ms=120), {b"x-gpu-time-ms": b"120", b"x-gpu-time-source": b"device"}),
        (_receipt(engine_ms=450, device_ms=0), {b"x-gpu-time-ms": b"0", b"x-gpu-time-source": b"device"}),
        (
            _receipt(engine_ms=None, device_ms=120, energy=36_000),
            {b"x-gpu-time-ms": b"120", b"x-gpu-time-source": b"device", b"x-gpu-energy-mj": b"36000"},
        ),
        (Receipt(device_usage=DeviceUsage(gap=DeviceUsage.GAP_FOREIGN_PROCESS)), {}),
    ],
    ids=["no accelerator", "engine alone", "measured", "measured as zero", "with energy", "unknown"],
)
def test_accelerator_time_names_its_source(receipt: Receipt, facts: dict[bytes, bytes]) -> None:
    assert _gpu(receipt) == facts


def test_image_and_audio_work_is_in_headers_if_present() -> None:
    receipt = Receipt()
    names = (b"x-image-steps", b"x-image-pixels", b"x-audio-ms")
    assert not set(names) & dict(receipt_facts(receipt)).keys()
    receipt.usage.image_steps, receipt.usage.image_pixels, receipt.usage.audio_milliseconds = 20, 1_048_576, 2_500
    facts = dict(receipt_facts(receipt))
    assert [facts[name] for name in names] == [b"20", b"1048576", b"2500"]


def test_priority_is_in_headers_only_if_it_was_lowered() -> None:
    assert b"x-priority" not in dict(receipt_facts(Receipt()))
    assert dict(receipt_facts(Receipt(lowered_priority=PRIORITY_LOW)))[b"x-priority"] == b"low"


def test_ignored_keep_alive_is_in_headers() -> None:
    assert b"x-keep-alive" not in dict(receipt_facts(Receipt()))
    assert dict(receipt_facts(Receipt(keep_alive_ignored=True)))[b"x-keep-alive"] == b"ignored"
