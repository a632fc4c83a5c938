"""What `weft doctor` says of the machine, on systems that are not this one as well."""

import os
import socket
from pathlib import Path
from typing import Any

import psutil
import pytest

from weft.gpu.nvml import Health, NvmlReading
from weft.kernel.errors.error_tree import WeftError
from weft_app.cli.doctor_checks import Finding, Verdict, accelerator_findings, platform_finding, port_findings
from weft_app.cli.serving import require_serving_platform
from weft_app.config.loader import parse_config

ABSENT = NvmlReading(health=Health.ABSENT)


def test_services_run_only_on_supported_platforms() -> None:
    for platform in ("linux", "darwin"):
        require_serving_platform(platform)
    with pytest.raises(WeftError, match="WSL"):
        require_serving_platform("win32")


@pytest.mark.parametrize(
    ("platform", "verdict", "words"),
    [
        ("linux", Verdict.OK, ""),
        ("darwin", Verdict.WARNING, "commands, meshes and joined runners run here"),
        ("win32", Verdict.FAILED, "up, serve, run and runner join do not"),
        ("freebsd14", Verdict.WARNING, "not supported by weft"),
    ],
)
def test_each_platform_reports_what_works_there(platform: str, verdict: Verdict, words: str) -> None:
    finding = platform_finding(platform, "System machine", "3.12.1")
    assert (finding.verdict, "Python 3.12.1" in finding.detail) == (verdict, True)
    assert words in finding.detail
    assert bool(finding.remedy) is (verdict is not Verdict.OK)


def _accelerators(platform: str, machine: str, nvidia: NvmlReading | None, folder: Path) -> list[Finding]:
    return list(accelerator_findings(platform, machine, nvidia, folder))


def test_one_line_is_shown_without_an_accelerator(tmp_path: Path) -> None:
    (finding,) = _accelerators("linux", "x86_64", ABSENT, tmp_path)
    assert (finding.verdict, "CPU" in finding.detail) == (Verdict.OK, True)


@pytest.mark.parametrize(("nvidia", "words"), [(None, "did not answer"), (NvmlReading(health=Health.FAILED), "fails")])
def test_hanging_or_failing_driver_is_a_warning(nvidia: NvmlReading | None, words: str, tmp_path: Path) -> None:
    (finding,) = _accelerators("linux", "x86_64", nvidia, tmp_path)
    assert (finding.verdict, finding.remedy) == (Verdict.WARNING, "nvidia-smi")
    assert words in finding.detail


def test_amd_card_is_detected_by_its_driver(tmp_path: Path) -> None:
    for name, vendor, size in (
        ("card0", "0x8086", ""),
        ("card1", "0x1002", str(16 * 1024**3)),
        ("card2", "0x1002", ""),
    ):
        device = tmp_path / "class" / "drm" / name / "device"
        device.mkdir(parents=True)
        (device / "vendor").write_text(f"{vendor}\n")
        if size:
            (device / "mem_info_vram_total").write_text(f"{size}\n")
    (tmp_path / "class" / "drm" / "card1-HDMI-A-1").mkdir()
    (finding,) = _accelerators("linux", "x86_64", ABSENT, tmp_path)
    assert finding.detail.startswith("AMD: card1 (16 GiB)")
    assert "accelerators.declared" in finding.remedy


def test_apple_gpu_is_derived_from_the_machine(tmp_path: Path) -> None:
    (finding,) = _accelerators("darwin", "arm64", ABSENT, tmp_path)
    assert "Metal" in finding.detail
    (finding,) = _accelerators("darwin", "x86_64", ABSENT, tmp_path)
    assert "CPU" in finding.detail


def test_every_start_port_is_checked_and_reported_with_a_remedy() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken, socket.create_server(("127.0.0.1", 0)) as other:
        ports = taken.getsockname()[1], other.getsockname()[1]
        document: dict[str, Any] = {"port": 0, "grpc_port": ports[0], "relay": {"listen": f"127.0.0.1:{ports[1]}"}}
        document["publishers"] = {"listen": f"127.0.0.1:{ports[1]}"}
        http, grpc, relay, publishers = port_findings(parse_config(document), None)
        assert http.verdict is Verdict.OK
        assert {each.verdict for each in (grpc, relay, publishers)} == {Verdict.FAILED}
        assert f"{ports[0]} (grpc_port)" in grpc.detail
        assert "--grpc-port" in grpc.remedy
        assert "--join-port" in relay.remedy
        assert f"{ports[1]} (publishers.listen)" in publishers.detail
        # They are taken by the mesh that runs here.
        running = {"url": "http://127.0.0.1:1", "pids": {"host": os.getpid()}}
        assert {each.verdict for each in port_findings(parse_config(document), running)} == {Verdict.OK}


def test_port_of_another_program_is_reported_while_a_mesh_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """It was reported as used by the mesh, and the next start failed."""
    monkeypatch.setattr(psutil.Process, "net_connections", lambda *_: [])
    with socket.create_server(("127.0.0.1", 0)) as taken:
        config = parse_config({"port": 0, "publishers": {"listen": f"127.0.0.1:{taken.getsockname()[1]}"}})
        *_, publishers = port_findings(config, {"url": "http://127.0.0.1:1", "pids": {"host": os.getpid()}})
    assert publishers.verdict is Verdict.FAILED
