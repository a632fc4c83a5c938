"""What a torture run finds of engines and leases that nobody owns."""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tools.torture.orphans import engines, ownerless, wrong_leases
from weft.api.registry.v1 import lease_pb2

MODELS = {"m-steady": "steady", "m-rare": "rare"}


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[psutil.Process]:
    """A process with the command line of a fake backend that writes to `tmp_path / "log"`."""
    wait = "import sys; print(flush=True); sys.stdin.read()"
    command = [sys.executable, "-c", wait, "weft_testing.fake_backend", "--request-log", str(tmp_path / "log")]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        yield psutil.Process(process.pid)
        process.kill()


def test_engine_without_a_living_runner_is_an_orphan(engine: psutil.Process, tmp_path: Path) -> None:
    assert engines(tmp_path / "other") == []
    assert engines(tmp_path / "log") == [engine]
    assert ownerless([engine], [os.getpid()]) == []
    assert ownerless([engine], [engine.pid]) == [f"engine {engine.pid} has no runner"]


def _lease(
    model: str, runner: str, state: lease_pb2.Lease.State.ValueType = lease_pb2.Lease.STATE_HELD
) -> lease_pb2.Lease:
    return lease_pb2.Lease(purpose=model, holder=lease_pb2.LeaseHolder(name=runner), state=state)


GOOD = (_lease("m-steady", "steady"), _lease("m-rare", "rare"))


@pytest.mark.parametrize(
    ("leases", "wrong"),
    [
        (GOOD, []),
        (GOOD[:1], ["m-rare of rare has 0 leases"]),
        ((*GOOD, GOOD[0]), ["m-steady of steady has 2 leases"]),
        ((*GOOD, _lease("m-old", "steady")), ["m-old of steady has 1 leases"]),
        (
            (GOOD[0], _lease("m-rare", "rare", lease_pb2.Lease.STATE_ORPHANED)),
            ["a lease for m-rare of rare is STATE_ORPHANED"],
        ),
    ],
)
def test_lease_without_its_engine_is_an_orphan(leases: tuple[lease_pb2.Lease, ...], wrong: list[str]) -> None:
    assert wrong_leases(leases, MODELS) == wrong
