"""The contenders that a run compares: their files, the counter that shows their way, and the table of ways."""

import sys
from pathlib import Path

import psutil
import pytest
import yaml
from kit.envoy import faults

from bench import launch
from bench.__main__ import contenders_of, parse_arguments
from bench.contender import BACKEND_ROLE, ENVOY, PEERS, WEFT_REAL, Contender, fill
from bench.launch import STUB, LaunchError, Target
from bench.load import Job, Result
from bench.report import Figures
from bench.scenarios import UNARY, Options, _measure_throughput
from runner_svc.runtimes.llama_server import xllamacpp_launcher

VALUES = {
    "port": "18080",
    "spare_port": "18081",
    "upstream_port": "18083",
    "stub_python": "/usr/bin/python3",
    "config": __file__,
}


def names(*arguments: str) -> list[str]:
    return [contender.name for contender in contenders_of(parse_arguments(arguments))]


def test_peers_are_benchmarked_beside_the_gateway_if_requested() -> None:
    assert names("--peers") == ["weft", "weft-apart", "envoy", "sglang-router", "smg", "vllm-router", "litellm"]
    assert names() == ["weft"]
    assert names("--only", "envoy", "--only", "unary") == ["envoy"]


def test_bare_envoy_accepts_its_configuration(tmp_path: Path) -> None:
    assert faults(yaml.safe_load(fill(ENVOY.config, VALUES)), tmp_path) == ""


def test_peer_requirements_are_pinned() -> None:
    assert all("==" in package for peer in PEERS for package in peer.packages)


DONE = Result(
    requests=10,
    events=0,
    failures={},
    wall_seconds=1.0,
    cpu_seconds=0.1,
    latency_p50=1.0,
    latency_p99=1.0,
    first_p50=1.0,
    first_p99=1.0,
)


def target(contender: Contender) -> Target:
    return Target(contender=contender, process=psutil.Process(), port=1, stub=psutil.Process())


def test_slow_contender_is_skipped_and_the_others_continue(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def run_load(job: Job, _: Path) -> Result:
        if job.headers:
            raise LaunchError("the load generator failed: TimeoutError")
        return DONE

    monkeypatch.setattr("bench.scenarios.run_load", run_load)
    slow = Contender(name="slow", command=(), headers={"Authorization": "k"})
    figures = Figures()
    _measure_throughput(Options(root=tmp_path, repetitions=2), figures, UNARY, [target(slow), target(STUB)])
    assert figures.skipped == ["slow: unary: the load generator failed: TimeoutError"]
    assert list(figures.uses) == [("unary", STUB.name)]


def test_weft_process_from_another_tree_does_not_run_this_one(tmp_path: Path) -> None:
    """`python -m` puts its own folder before all installed packages."""
    (tmp_path / "bench.py").write_text("print('the other tree')", "utf-8")
    command = [sys.executable, "-m", "bench"]
    with launch.started(command, {}, tmp_path / "output.log") as process:
        process.wait(timeout=30.0)
    assert (tmp_path / "output.log").read_text("utf-8") == "the other tree\n"


def test_engine_of_the_demo_counts_as_a_backend_after_its_launcher_was_renamed() -> None:
    markers = [marker for marker, role in WEFT_REAL.roles.items() if role == BACKEND_ROLE]
    assert any(marker in xllamacpp_launcher.__name__ for marker in markers)
