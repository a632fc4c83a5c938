"""`weft mesh lease release`, `weft mesh lease list` and `weft get leases`."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from cli_harness import ScriptedMesh, scripted_mesh

from weft.api.registry.v1 import lease_pb2, lease_service_pb2

GIB = 1024**3
PROGRAM, RUNNER = lease_pb2.LeaseHolder.KIND_PROGRAM, lease_pb2.LeaseHolder.KIND_RUNNER


def _lease(lease_id: str, kind: lease_pb2.LeaseHolder.Kind.ValueType, purpose: str) -> lease_pb2.Lease:
    return lease_pb2.Lease(
        lease_id=lease_id,
        host="titan",
        holder=lease_pb2.LeaseHolder(kind=kind, name=f"{purpose}-holder"),
        purpose=purpose,
        shares=[lease_pb2.DeviceBytes(device_index=1, bytes=5 * GIB)],
        state=lease_pb2.Lease.STATE_HELD,
    )


@pytest.fixture
def mesh(tmp_path: Path) -> Iterator[ScriptedMesh]:
    with scripted_mesh(tmp_path) as mesh:
        leases = [_lease("lease-p", PROGRAM, "training"), _lease("lease-r", RUNNER, "qwen")]
        device = lease_service_pb2.DeviceMemory(device=lease_pb2.Device(index=1, name="Big", total_bytes=24 * GIB))
        mesh.hosts.append(lease_service_pb2.HostMemory(host="titan", devices=[device], leases=leases))
        yield mesh


def test_leases_show_holder_and_expiry(mesh: ScriptedMesh) -> None:
    header, *rows = mesh.run("get", "leases").stdout.splitlines()
    assert header.split() == ["LEASE", "HOST", "HOLDER", "PURPOSE", "STATE", "MEMORY", "DEVICES", "AGE", "ENDS"]
    assert [" ".join(row.split()) for row in rows] == [
        "lease-p titan training-holder training held 5 GiB 1 - with its program",
        "lease-r titan qwen-holder qwen held 5 GiB 1 - when the model is unloaded",
    ]
    assert mesh.run("mesh", "lease", "list").stdout.endswith("\n".join([header, *rows]) + "\n")
    (one,) = json.loads(mesh.run("get", "lease", "lease-p", "-o", "json").stdout)["items"]
    assert (one["leaseId"], one["host"], one["holderKind"]) == ("lease-p", "titan", "program")
    assert mesh.run("get", "leases", "-o", "name").stdout == "lease/lease-p\nlease/lease-r\n"


def test_ended_lease_returns_not_found(mesh: ScriptedMesh) -> None:
    for done in (mesh.run("get", "lease/none"), mesh.run("mesh", "lease", "release", "none", "--yes")):
        assert done.exit_code == 3
        assert "there is no lease" in done.stderr


def test_release_reports_when_the_memory_becomes_free(mesh: ScriptedMesh) -> None:
    done = mesh.run("mesh", "lease", "release", "lease-p", "--yes")
    assert done.exit_code == 0
    assert done.stdout == "lease/lease-p is released: 5 GiB of titan are free once its processes have ended\n"
    assert mesh.releases[0].requested_by == "local"
    assert "when its processes have ended" in mesh.run("get", "lease/lease-p").stdout


@pytest.mark.parametrize(
    ("lease", "code", "words"),
    [("lease-p", 2, "--yes: is required without a terminal"), ("lease-r", 4, "weft unload qwen")],
    ids=["without a terminal", "of a model"],
)
def test_refused_release_suggests_what_frees_the_memory(mesh: ScriptedMesh, lease: str, code: int, words: str) -> None:
    done = mesh.run("mesh", "lease", "release", lease)
    assert done.exit_code == code
    assert words in done.stderr
