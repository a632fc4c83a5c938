"""What `weft doctor --mesh` says of the versions in a mesh."""

from pathlib import Path
from types import SimpleNamespace

import pytest

from weft.api.operations.v1 import process_service_pb2 as pb
from weft_app.cli import doctor_checks
from weft_app.cli.doctor_checks import (
    Finding,
    Verdict,
    are_neighbours,
    examine_mesh,
    examine_versions,
    release_of,
)

Process = tuple[str, pb.GetHealthResponse]


def _process(name: str, version: str, *schemas: pb.DatabaseSchema) -> Process:
    return name, pb.GetHealthResponse(version=version, schemas=schemas)


def _schema(known: str, found: str = "", service: str = "registry") -> pb.DatabaseSchema:
    return pb.DatabaseSchema(service=service, known_revision=known, database_revision=found)


def _mix(*processes: Process) -> Finding:
    (finding,) = [finding for finding in examine_versions(processes) if finding.check == "mesh"]
    return finding


def _schemas(*processes: Process) -> list[Finding]:
    return [finding for finding in examine_versions(processes) if finding.check == "schema"]


@pytest.mark.parametrize(
    ("one", "other", "expected"),
    [
        ("0.4.0", "0.4.7", True),
        ("0.4.0", "0.5.0", True),
        ("0.5.0rc1", "0.4.9", True),
        ("0.4.0", "0.6.0", False),
        ("1.4.0", "0.4.0", False),
    ],
)
def test_neighboring_releases_differ_by_one_minor_version(one: str, other: str, expected: bool) -> None:
    first, second = release_of(one), release_of(other)
    assert first is not None
    assert second is not None
    assert are_neighbours(first, second) is expected
    assert are_neighbours(second, first) is expected


def test_each_process_is_listed_with_its_version_and_supported_schemas() -> None:
    found = examine_versions([_process("registry", "0.4.0", _schema("0015", "0015")), _process("runner/a", "0.4.0")])
    assert [(each.detail, each.verdict) for each in found] == [
        ("registry: weft 0.4.0, registry schema 0015", Verdict.OK),
        ("runner/a: weft 0.4.0", Verdict.OK),
        ("all on one release: 0.4.0", Verdict.OK),
    ]


def test_process_without_a_version_is_reported() -> None:
    silent, _ = examine_versions([_process("registry", "")])
    assert silent.verdict is Verdict.WARNING
    assert silent.detail == "registry: an older release that does not report its version"


def test_neighboring_versions_pass_and_outdated_processes_are_listed() -> None:
    mixed = _mix(_process("registry", "0.5.0"), _process("runner/b", "0.4.0"), _process("runner/a", "0.4.1"))
    assert mixed.verdict is Verdict.OK
    assert mixed.detail == "two adjacent releases, 0.4 and 0.5, which are compatible"
    assert mixed.remedy == "still to upgrade: runner/a, runner/b"


def test_versions_too_far_apart_fail_even_if_each_has_a_neighbor() -> None:
    mixed = _mix(_process("registry", "0.6.0"), _process("router", "0.5.0"), _process("runner/a", "0.4.0"))
    assert mixed.verdict is Verdict.FAILED
    assert mixed.remedy == "upgrade these first: runner/a"


def test_process_with_a_newer_database_schema_is_reported() -> None:
    old = _process("router", "0.4.0", _schema("0007", "0008", "router"))
    (finding,) = _schemas(_process("registry", "0.5.0", _schema("0015", "0015")), old)
    assert finding.verdict is Verdict.FAILED
    assert finding.detail.startswith("router: the router database has the schema 0008, and weft 0.4.0 knows 0007")


def test_standby_without_an_open_database_is_compared_with_the_owner() -> None:
    owner = _process("registry", "0.5.0", _schema("0016", "0016"))
    assert _schemas(owner, _process("registry standby", "0.5.0", _schema("0016"))) == []
    (finding,) = _schemas(owner, _process("registry standby", "0.4.0", _schema("0015")))
    assert finding.remedy == "upgrade registry standby"


def test_newer_standby_passes_beside_an_older_owner_before_migration() -> None:
    assert _schemas(_process("a", "0.4.0", _schema("0015", "0015")), _process("b", "0.5.0", _schema("0016"))) == []


def test_gateways_of_two_versions_on_one_host_are_both_reported(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    gateways = [
        pb.WatchingProcess(service="gateway", host="edge", version=version)
        for version in ("0.4.0", "0.4.1", "0.5.0", "0.5.0")
    ]
    registry = pb.GetHealthResponse(version="0.5.0", watching_processes=gateways)
    router = {"name": "atlas", "address": "a:1", "version": "0.5.0"}
    monkeypatch.setattr(doctor_checks, "_runners", lambda _: {})
    monkeypatch.setattr(doctor_checks, "_registries", lambda _: {"mesh": "a:1"})
    monkeypatch.setattr(doctor_checks, "ROUTERS", SimpleNamespace(read=lambda _: [router]))
    monkeypatch.setattr(doctor_checks, "health_of", lambda _: registry)
    *processes, mix = examine_mesh(tmp_path)
    assert [each.detail for each in processes] == [
        "mesh: weft 0.5.0",
        "router/atlas: weft 0.5.0",
        "gateway@edge: weft 0.4.0",
        "gateway@edge: weft 0.4.1",
        "gateway@edge (2 times): weft 0.5.0",
    ]
    assert mix.remedy == "still to upgrade: gateway@edge"
