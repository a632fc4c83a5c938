"""Whatever a driver says, a sighting that the registry takes is made of it: otherwise all leases would be lost."""

import os
from typing import Any

import pytest
from test_nvml_reader import GIB, Card, Listed, StandIn

from weft.gpu.nvml import NvmlReader
from weft.gpu.observer import HostObserver
from weft.gpu.snapshot import HostSnapshot, check_processes, snapshot_from, snapshot_message
from weft.kernel.schemas.field_rules import check_message

HUGE = 2**64 - 2
OTHER = Card(name="other", bus=9)


def _sight(*cards: Card) -> HostSnapshot:
    observer = HostObserver(reader=NvmlReader(StandIn(*cards).load), host="h")
    message = snapshot_message(observer.look_blocking(fresh=True))
    check_message(message, "sighting")
    check_processes(message, "sighting")
    return snapshot_from(message)


def _held(**listed: Any) -> Card:
    return Card(used=GIB, computing=[Listed(**{"pid": os.getpid(), "usedGpuMemory": GIB, **listed})])


@pytest.mark.parametrize(
    "card",
    [
        pytest.param(Card(total=0), id="no memory"),
        pytest.param(Card(total=HUGE), id="endless memory"),
        pytest.param(Card(total=8 * GIB, used=-GIB), id="more free than there is"),
        pytest.param(Card(total=8 * GIB, used=9 * GIB), id="more used than there is"),
        pytest.param(Card(name="two\nlines \x1b[31m\u202e"), id="a name that steers terminals"),
        pytest.param(Card(name=""), id="no name"),
        pytest.param(Card(name="n" * 10_000), id="a name without end"),
        pytest.param(Card(utilization=65_535), id="busier than it can be"),
        pytest.param(Card(utilization=-1), id="less busy than idle"),
        pytest.param(_held(usedGpuMemory=HUGE), id="a process with endless memory"),
        pytest.param(_held(usedGpuMemory=-1), id="a process with less than none"),
        pytest.param(_held(pid=0), id="process 0"),
        pytest.param(_held(pid=2**31), id="process 2 to the 31st"),
        pytest.param(_held(pid=2**32 - 1), id="process minus one"),
    ],
    ids=str,
)
def test_invalid_card_data_does_not_spoil_the_snapshot(card: Card) -> None:
    sight = _sight(card, OTHER)
    assert sight.devices[-1].name == "other"
    assert all(0 <= (device.used_bytes or 0) <= device.total_bytes for device in sight.devices)


def test_amount_larger_than_its_card_is_unknown() -> None:
    (process,) = _sight(_held(usedGpuMemory=HUGE)).processes
    assert (process.bytes_by_device, process.memory_unknown) == ((), True)
