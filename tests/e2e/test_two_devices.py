"""A fake of vLLM and llama.cpp's server itself take turns on two declared devices: nothing is ever booked twice."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from kit.ledger_checker import LedgerChecker, Sample, SeenDevice, SeenLease
from mesh_process import MeshProcess, running_mesh, write_config
from two_devices import (
    MODELS,
    NARROW,
    QUANTIZED,
    QUICK,
    SECTIONS,
    SERVED,
    WIDE,
    mixed_load,
    runner_of_llama,
    runner_of_vllm,
    watched,
)

from weft_app.compose.demo import demo_model_path
from weft_testing.fake_backend.process import fake_backend_command

REQUESTS = 6
TURNS = 3
MIB = 1024**2
pytestmark = [pytest.mark.real, pytest.mark.timeout(300)]


@pytest.fixture
def mesh(tmp_path: Path) -> Iterator[MeshProcess]:
    served = runner_of_vllm("org/model", fake_backend_command(tokens_per_second=50.0))
    quantized = runner_of_llama(str(demo_model_path()))
    config = write_config(tmp_path, served, quantized, router={"max_cold_wait_seconds": 2.0}, **SECTIONS)
    with running_mesh(tmp_path / "home", "--config", str(config), within=QUICK) as running:
        yield running


@pytest.mark.nightly("repeats kills, cuts or swaps of a whole mesh")
async def test_engines_swapping_under_mixed_load_never_share_memory_and_every_request_ends(mesh: MeshProcess) -> None:
    async with watched(mesh) as stage:
        await mixed_load(stage, requests=REQUESTS, turns=TURNS)
    assert stage.outcomes.failed == {}
    assert all(stage.outcomes.answered[model] >= 2 * REQUESTS for model in MODELS)
    assert all(len(stage.checker.granted(model)) >= TURNS for model in MODELS)
    assert {tuple(lease.shares) for lease in stage.checker.granted(WIDE)} == {(0, 1)}, "it is split over both"
    assert {len(lease.shares) for lease in stage.checker.granted(NARROW)} == {1}


@pytest.mark.nightly("kills a runner of a real engine")
@pytest.mark.parametrize(
    ("runner", "model"),
    [
        (SERVED, WIDE),
        pytest.param(QUANTIZED, NARROW, marks=pytest.mark.nightly("repeats kills, cuts or swaps of a whole mesh")),
    ],
    ids=[SERVED, QUANTIZED],
)
async def test_lease_of_a_killed_runner_ends_only_after_its_engine_exits(
    mesh: MeshProcess, runner: str, model: str
) -> None:
    async with watched(mesh) as stage:
        await stage.kill_under_load(runner, model, REQUESTS)
        assert stage.outcomes.answered.keys() == set(MODELS), "all models answer after it"


DEVICES = tuple(SeenDevice(index=index, leasable_bytes=2488 * MIB, booked_bytes=0) for index in (0, 1))
LEASE = SeenLease(lease_id="a", fencing_number=1, model="wide", shares={0: 2000 * MIB, 1: 2000 * MIB})
OTHER = SeenLease(lease_id="b", fencing_number=2, model="narrow", shares={0: 2000 * MIB})


def sample(*leases: SeenLease, **engines: str) -> Sample:
    """The devices are booked with what the leases reserve."""
    devices = tuple(
        replace(device, booked_bytes=sum(lease.shares.get(device.index, 0) for lease in leases)) for device in DEVICES
    )
    return Sample(devices=devices, leases=leases, engines=dict(engines.items()))


@pytest.mark.parametrize(
    ("samples", "broken"),
    [
        ([sample(LEASE, one="wide"), sample(LEASE), sample(), sample(OTHER, two="narrow")], []),
        ([sample(LEASE, OTHER)], ["device 0 is booked beyond its size"]),
        (
            [replace(sample(LEASE), devices=DEVICES)],
            [f"device {n} is not booked with what its leases reserve" for n in (0, 1)],
        ),
        ([sample(replace(LEASE, shares={1: 1, 0: 1}))], ["a lease of wide takes its devices out of order"]),
        ([sample(OTHER), sample(), sample(LEASE)], ["a lease of wide has a number that is not new"]),
        ([sample(LEASE), sample(), sample(LEASE)], ["a lease of wide that had ended is back"]),
        ([sample(LEASE), sample(replace(LEASE, shares={0: 1}))], ["a lease of wide has changed"]),
        ([sample(one="wide")], ["an engine of wide runs without a lease"]),
        ([sample(LEASE, one="wide"), sample(OTHER, one="wide")], ["the lease of wide ended before its engine had"]),
    ],
)
def test_checker_detects_every_ledger_rule_violation(samples: list[Sample], broken: list[str]) -> None:
    checker = LedgerChecker()
    for each in samples:
        checker.note(each)
    assert checker.broken == broken
