"""The real reader and the real `pynvml` over a library in C that tells what a folder says."""

import os
import signal
from pathlib import Path
from typing import Any

import pytest
from fake_cards_stage import GIB, Stage, held, needs_the_fake, sleeper

from weft.gpu.snapshot import Source

pytestmark = [pytest.mark.slow("starts processes on fake cards"), needs_the_fake]

_LOOK = """
import json, sys
from weft.gpu.observer import HostObserver
from weft.gpu.snapshot import ProcessId
numbers = [int(text) for text in sys.argv[1:]]
watched = [ProcessId(*numbers[at : at + 2]) for at in range(0, len(numbers), 2)]
sight = HostObserver().look_blocking(watched)
print(json.dumps({
    "source": sight.source,
    "devices": [[d.index, d.id, d.name, d.total_bytes, d.used_bytes, d.utilization] for d in sight.devices],
    "draws": [[d.power_milliwatts, d.energy_millijoules] for d in sight.devices],
    "processes": [[one.process.pid, one.alive, one.bytes_by_device, one.memory_unknown] for one in sight.processes],
}))
"""
_GPU_TIME = """
import json, sys, time
from pathlib import Path
from runner_svc.supervise.process_time import GpuTime
gpu = GpuTime()
def asked():
    known = gpu.seconds([7])
    # Each question starts a reading; the next one would not start its own while this one runs.
    while gpu._reader.is_alive():
        time.sleep(0.001)
    return known
def settled():
    asked()
    return asked()
samples = Path(sys.argv[1])
samples.write_text("7 10000000 100\\n")
first = settled()
samples.write_text("7 10000000 100\\n7 11000000 50\\n8 11000000 100\\n7 12000000 100\\n")
print(json.dumps([first, settled()]))
"""


@pytest.fixture
def stage(tmp_path: Path) -> Stage:
    return Stage(tmp_path, 8 * GIB, 16 * GIB)


def _look(stage: Stage, *watched: object) -> Any:
    return stage.ask(_LOOK, *watched)


def test_cards_are_listed_with_sizes_in_bus_order(stage: Stage) -> None:
    stage.cards.write("buses", 9, 4)
    stage.cards.write("utilization", 25, 100)
    stage.cards.write("reserved_bytes", 100)
    assert _look(stage)["devices"] == [
        [0, "GPU-fake-1", "Fake Card", 16 * GIB, 100, 1.0],
        [1, "GPU-fake-0", "Fake Card", 8 * GIB, 100, 0.25],
    ]


def test_power_and_energy_are_read_and_unknown_without_a_sensor(stage: Stage) -> None:
    assert _look(stage)["draws"] == [[None, None], [None, None]]
    stage.cards.write("power", 120_500, 0)
    stage.cards.write("energy", 2**40, 7)
    assert _look(stage)["draws"] == [[120_500, 2**40], [0, 7]]


def test_memory_of_live_processes_is_seen_and_of_dead_ones_is_free(stage: Stage) -> None:
    with sleeper() as one, sleeper() as other:
        stage.cards.hold(one, 0, GIB)
        stage.cards.hold(one, 1, 2 * GIB)
        stage.cards.hold(other, 1, 3 * GIB)
        seen = _look(stage)
        assert held(seen["processes"]) == {
            one.pid: [True, [[0, GIB], [1, 2 * GIB]], False],
            other.pid: [True, [[1, 3 * GIB]], False],
        }
        assert [device[4] for device in seen["devices"]] == [GIB, 5 * GIB]
        os.kill(other.pid, signal.SIGKILL)
        os.waitid(os.P_PID, other.pid, os.WEXITED | os.WNOWAIT)
        seen = _look(stage, other.pid, other.start_ticks)
        assert held(seen["processes"])[other.pid] == [False, [], False], "dead, though nobody has reaped it"
        assert [device[4] for device in seen["devices"]] == [GIB, 2 * GIB]
        assert stage.cards.held_bytes() == [GIB, 2 * GIB], "the folder counts as the library does"


def test_process_list_larger_than_the_initial_buffer_is_complete(stage: Stage) -> None:
    with sleeper() as one:
        for part in range(300):
            stage.cards.hold(one, 0, 1000, part=part)
        assert held(_look(stage)["processes"]) == {one.pid: [True, [[0, 300_000]], False]}


@pytest.mark.parametrize("switch", ["no_process_memory", "no_process_lists", "hidden_processes", "foreign_pids"])
def test_unreported_process_memory_is_unknown_and_never_zero(stage: Stage, switch: str) -> None:
    stage.cards.switch(switch, on=True)
    with sleeper() as one:
        stage.cards.hold(one, 0, GIB)
        seen = _look(stage, one.pid, one.start_ticks)
        assert held(seen["processes"]) == {one.pid: [True, [], True]}
        assert seen["source"] == Source.NVML
        assert seen["devices"][0][4] == GIB, "what is in use is known all the same"
        stage.cards.switch(switch, on=False)
        seen = _look(stage, one.pid, one.start_ticks)
        assert held(seen["processes"]) == {one.pid: [True, [[0, GIB]], False]}, "the negative control"


def test_failing_driver_is_unknown_and_an_unloaded_one_means_no_devices(stage: Stage) -> None:
    stage.cards.switch("fail", on=True)
    assert _look(stage)["source"] == Source.UNKNOWN
    stage.cards.switch("fail", on=False)
    stage.cards.switch("no_driver", on=True)
    seen = _look(stage)
    assert (seen["source"], seen["devices"]) == (Source.NVML, [])


def test_gpu_time_is_summed_from_library_samples(stage: Stage) -> None:
    stage.cards.write("devices", f"GPU-one {GIB} One")
    assert stage.ask(_GPU_TIME, stage.cards.folder / "samples") == [0.0, pytest.approx(1.5)]


def test_no_fake_cards_are_seen_without_the_fake_library(stage: Stage) -> None:
    """The negative control: the cards come from the library and from nowhere else."""
    stage.environment.pop("LD_LIBRARY_PATH")
    assert not [device for device in _look(stage)["devices"] if device[1].startswith("GPU-fake")]
