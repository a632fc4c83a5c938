"""The reader over a stand-in for the `pynvml` module."""

import os
from dataclasses import dataclass, field
from typing import Any

import pytest

from weft.gpu.nvml import (
    LOOK_AGAIN_SECONDS,
    UNNAMED_BYTES,
    Health,
    NvmlReader,
    NvmlReading,
    capabilities_within,
)
from weft.gpu.process import process_id_of

GIB = 1024**3
NO_PART = 0xFFFFFFFF
NOBODY = 2**22 + 5
ME = os.getpid()


class NVMLError(Exception):
    def __init__(self, value: int) -> None:
        super().__init__(value)
        self.value = value


@dataclass(frozen=True)
class Info:
    """Whatever the module answers with."""

    total: int = 0
    free: int = 0
    reserved: int = 0
    gpu: int = 0
    domain: int = 0
    bus: int = 0
    device: int = 0


@dataclass(frozen=True)
class Listed:
    pid: int
    usedGpuMemory: int | None  # noqa: N815 - NVML's name
    gpuInstanceId: int = NO_PART  # noqa: N815 - NVML's name
    computeInstanceId: int = NO_PART  # noqa: N815 - NVML's name


@dataclass
class Card:
    total: int = 8 * GIB
    used: int = 0
    reserved: int = 0
    bus: int = 1
    name: str = "Card"
    utilization: int | None = 40
    power: int | None = None
    energy: int | None = None
    computing: list[Listed] | None = field(default_factory=list)
    drawing: list[Listed] = field(default_factory=list)
    error: int | None = None
    capability: tuple[int, int] = (8, 6)


class StandIn:
    """The part of the `pynvml` module that is used."""

    NVMLError = NVMLError
    NVML_ERROR_NOT_SUPPORTED = 3
    NVML_ERROR_FUNCTION_NOT_FOUND = 13
    nvmlMemory_v2 = 0x02000028  # noqa: N815 - NVML's name

    def __init__(self, *cards: Card, lists: str = "_v3") -> None:
        self.cards = list(cards)
        self.error: int | None = None
        self.loads = 0
        setattr(self, f"nvmlDeviceGetComputeRunningProcesses{lists}", self._computing)
        setattr(self, f"nvmlDeviceGetGraphicsRunningProcesses{lists}", lambda card: card.drawing)

    def load(self) -> Any:
        self.loads += 1
        return self

    def nvmlDeviceGetCount(self) -> int:  # noqa: N802 - NVML's name
        if self.error is not None:
            raise NVMLError(self.error)
        return len(self.cards)

    def nvmlDeviceGetHandleByIndex(self, number: int) -> Card:  # noqa: N802 - NVML's name
        return self.cards[number]

    def nvmlDeviceGetPciInfo(self, card: Card) -> Info:  # noqa: N802 - NVML's name
        return Info(bus=card.bus)

    def nvmlDeviceGetUUID(self, card: Card) -> str:  # noqa: N802 - NVML's name
        return f"GPU-{card.name}"

    def nvmlDeviceGetName(self, card: Card) -> str:  # noqa: N802 - NVML's name
        return card.name

    def nvmlDeviceGetMemoryInfo(self, card: Card, version: int = 0) -> Info:  # noqa: N802 - NVML's name
        if card.error is not None:
            raise NVMLError(card.error)
        return Info(total=card.total, free=card.total - card.used, reserved=card.reserved if version else 0)

    def nvmlDeviceGetUtilizationRates(self, card: Card) -> Info:  # noqa: N802 - NVML's name
        if card.utilization is None:
            raise NVMLError(self.NVML_ERROR_NOT_SUPPORTED)
        return Info(gpu=card.utilization)

    def nvmlDeviceGetPowerUsage(self, card: Card) -> int:  # noqa: N802 - NVML's name
        if card.power is None:
            raise NVMLError(self.NVML_ERROR_NOT_SUPPORTED)
        return card.power

    def nvmlDeviceGetTotalEnergyConsumption(self, card: Card) -> int:  # noqa: N802 - NVML's name
        if card.energy is None:
            raise NVMLError(self.NVML_ERROR_NOT_SUPPORTED)
        return card.energy

    def nvmlDeviceGetCudaComputeCapability(self, card: Card) -> list[int]:  # noqa: N802 - NVML's name
        return list(card.capability)

    def _computing(self, card: Card) -> list[Listed]:
        if card.computing is None:
            raise NVMLError(self.NVML_ERROR_NOT_SUPPORTED)
        return card.computing


def _read(*cards: Card) -> NvmlReading:
    return NvmlReader(StandIn(*cards).load).read()


def test_compute_capabilities_are_listed_once_or_unknown() -> None:
    cards = StandIn(Card(capability=(12, 0)), Card(), Card())
    assert capabilities_within(60.0, cards.load) == ("8.6", "12.0")
    cards.error = 9
    assert capabilities_within(60.0, cards.load) == ()


def test_cards_are_numbered_by_pci_bus_for_any_library_order() -> None:
    reading = _read(Card(name="far", bus=9), Card(name="near", bus=4), Card(name="farthest", bus=200))
    assert [(card.index, card.name) for card in reading.devices] == [(0, "near"), (1, "far"), (2, "farthest")]


def test_used_memory_is_everything_not_free_including_driver_reservations() -> None:
    (card,) = _read(Card(total=8 * GIB, used=3 * GIB, reserved=GIB)).devices
    assert (card.id, card.total_bytes, card.used_bytes, card.utilization) == ("GPU-Card", 8 * GIB, 3 * GIB, 0.4)


def test_process_that_computes_and_draws_is_counted_once() -> None:
    reading = _read(Card(computing=[Listed(ME, GIB)], drawing=[Listed(ME, GIB), Listed(NOBODY, 5)]))
    assert [(one.process.pid, one.bytes_by_device) for one in reading.holders] == [
        (ME, ((0, GIB),)),
        (NOBODY, ((0, 5),)),
    ]
    assert [one.process if one.alive else None for one in reading.holders] == [process_id_of(ME), None]
    assert reading.names_processes


def test_mig_instances_of_a_card_are_summed() -> None:
    reading = _read(
        Card(computing=[Listed(ME, GIB, 1), Listed(ME, 2 * GIB, 2)]), Card(computing=[Listed(ME, 7)], bus=2)
    )
    assert reading.holders[0].bytes_by_device == ((0, 3 * GIB), (1, 7))


def test_amount_missing_from_the_driver_is_unknown_and_not_zero() -> None:
    reading = _read(Card(computing=[Listed(ME, None, 1), Listed(ME, GIB, 2)]), Card(computing=[Listed(ME, 7)], bus=2))
    (holder,) = reading.holders
    assert holder.memory_unknown
    assert holder.bytes_by_device == ((1, 7),)


def test_older_driver_is_queried_with_older_list_functions() -> None:
    reading = NvmlReader(StandIn(Card(computing=[Listed(ME, GIB)]), lists="_v2").load).read()
    assert reading.holders[0].bytes_by_device == ((0, GIB),)


def test_process_memory_is_unknown_without_process_lists() -> None:
    reading = _read(Card(computing=None, used=GIB))
    assert reading.health is Health.WELL
    assert not reading.names_processes
    assert reading.devices[0].used_bytes == GIB


def test_nonexistent_pids_belong_to_another_namespace() -> None:
    assert not _read(Card(computing=[Listed(NOBODY, GIB), Listed(NOBODY + 1, GIB)])).names_processes
    assert _read(Card(computing=[Listed(NOBODY, GIB), Listed(ME, GIB)])).names_processes, "one of them is here"


@pytest.mark.parametrize(
    ("card", "names"),
    [
        (Card(used=UNNAMED_BYTES), True),
        (Card(used=UNNAMED_BYTES + 1), False),
        (Card(used=UNNAMED_BYTES + 700, reserved=700), True),
        (Card(used=UNNAMED_BYTES + 1, computing=[Listed(ME, 1)]), True),
    ],
)
def test_used_memory_without_any_process_means_hidden_processes(card: Card, names: bool) -> None:
    assert _read(card).names_processes is names


def test_card_without_its_own_memory_is_omitted_and_others_keep_their_numbers() -> None:
    reading = _read(Card(error=3, bus=1), Card(name="other", bus=2))
    assert [(card.index, card.name) for card in reading.devices] == [(1, "other")]


@pytest.mark.parametrize(
    ("power", "energy"), [(0, 0), (312_000, 2**40), (None, 7), (7, None), (-1, -1), (2**32 - 1, 2**63)]
)
def test_power_and_energy_are_as_reported_or_unknown(power: int | None, energy: int | None) -> None:
    (card,) = _read(Card(power=power, energy=energy)).devices
    assert card.power_milliwatts == (power if power in (0, 7, 312_000) else None)
    assert card.energy_millijoules == (energy if energy in (0, 7, 2**40) else None)


def test_driver_without_power_functions_reports_neither(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(StandIn, "nvmlDeviceGetPowerUsage")
    monkeypatch.delattr(StandIn, "nvmlDeviceGetTotalEnergyConsumption")
    (card,) = _read(Card(power=1, energy=1)).devices
    assert (card.power_milliwatts, card.energy_millijoules) == (None, None)


def test_unknown_utilization_is_not_an_error() -> None:
    assert _read(Card(utilization=None)).devices[0].utilization is None


@pytest.mark.parametrize("error", [OSError("no libnvidia-ml"), ImportError("no pynvml"), NVMLError(12), NVMLError(9)])
def test_missing_library_is_searched_once_a_minute(error: Exception) -> None:
    now, tries = 100.0, 0

    def load() -> Any:
        nonlocal tries
        tries += 1
        raise error

    reader = NvmlReader(load, lambda: now)
    assert [reader.read().health for _ in range(3)] == [Health.ABSENT] * 3
    assert tries == 1
    now += LOOK_AGAIN_SECONDS
    assert reader.read().health is Health.ABSENT
    assert tries == 2


def test_failed_library_is_reinitialized_and_recovers() -> None:
    module = StandIn(Card())
    reader = NvmlReader(module.load)
    assert reader.read().health is Health.WELL
    module.error = 999
    assert reader.read() == NvmlReading(health=Health.FAILED)
    module.error = None
    assert reader.read().health is Health.WELL
    assert module.loads == 2


def test_temporarily_uninitializable_library_is_retried_immediately() -> None:
    tries = 0

    def load() -> Any:
        nonlocal tries
        tries += 1
        raise NVMLError(18)  # the driver was exchanged under it

    reader = NvmlReader(load, lambda: 100.0)
    assert [reader.read().health for _ in range(2)] == [Health.FAILED] * 2
    assert tries == 2
