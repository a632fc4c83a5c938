"""The contenders that a run compares: their files, the counter that shows their way, and the table of ways."""

import sys
from pathlib import Path

import psutil
import pytest
import yaml
from kit.envoy import faults

from bench import launch
from bench.__main__ import contenders_of, parse_arguments
from bench.contender import ENVOY, PEERS, Contender, fill
from bench.launch import STUB, LaunchError, Target
from bench.load import Job, Result
from bench.machine import describe_machine
from bench.measures import ADDED_UNARY_P50, CHUNK_CPU, UNARY_CPU
from bench.report import Figures, Report, way_table
from bench.scenarios import Options, _measure_throughput, unary

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
    assert names("--peers") == ["weft", "envoy", "sglang-router", "vllm-router", "litellm"]
    assert names() == ["weft"]
    assert names("--only", "envoy", "--only", "unary") == ["envoy"]


def test_bare_envoy_accepts_its_configuration(tmp_path: Path) -> None:
    assert faults(yaml.safe_load(fill(ENVOY.config, VALUES)), tmp_path) == ""


def test_peer_requirements_are_pinned() -> None:
    assert all("==" in package for peer in PEERS for package in peer.packages)


DONE = Result(
    requests=10,
    events=0,
    tokens=0,
    failures={},
    reconnects=0,
    wall_seconds=1.0,
    cpu_seconds=0.1,
    latency_p50=1.0,
    latency_p99=1.0,
    first_p50=1.0,
    first_p99=1.0,
)


def target(contender: Contender) -> Target:
    return Target(contender=contender, process=psutil.Process(), port=1, stub=psutil.Process(), stub_port=1)


def test_slow_contender_is_skipped_and_the_others_continue(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def run_load(job: Job, _: Path) -> Result:
        if job.headers:
            raise LaunchError("the load generator failed: TimeoutError")
        return DONE

    monkeypatch.setattr("bench.scenarios.run_load", run_load)
    slow = Contender(name="slow", command=(), headers={"Authorization": "k"})
    figures = Figures()
    _measure_throughput(Options(root=tmp_path, repetitions=2), figures, unary(), [target(slow), target(STUB)])
    assert figures.skipped == ["slow: unary: the load generator failed: TimeoutError"]
    assert [share.contender for share in figures.shares()] == [STUB.name]


def test_mode_table_splits_costs_by_process() -> None:
    figures = Figures()
    for measure, value in ((UNARY_CPU, 1500.4), (CHUNK_CPU, 12.25), (ADDED_UNARY_P50, 0.5)):
        figures.add(measure, "weft", value)
    costs = {"envoy": 0.1, "host": 0.5, "runner": 0.9, "backend": 0.4, "generator": 0.2}
    figures.add_use("unary", "weft", cpu_seconds=costs, wall_seconds=1.0, units=1_000, failures=2)
    figures.add_use("stream", "weft", cpu_seconds=costs, wall_seconds=1.0, units=100_000, failures=0)
    figures.add_use("unary", STUB.name, cpu_seconds={"backend": 0.4}, wall_seconds=1.0, units=1_000, failures=0)
    report = Report(
        machine=describe_machine(Path(__file__).parent),
        settings={},
        packages={},
        rows=figures.rows((UNARY_CPU, CHUNK_CPU, ADDED_UNARY_P50)),
        shares=figures.shares(),
    )
    page = way_table(report)
    expected = "| weft | 1,500 | envoy 100, host 500, runner 900 | 12.2 | envoy 1.0, host 5.0, runner 9.0 | 0.50 | 2 |"
    assert expected in page
    assert "| stub (direct) | - | backend 400 | - | - | - | 0 |" in page


def test_weft_process_from_another_tree_does_not_run_this_one(tmp_path: Path) -> None:
    """`python -m` puts its own folder before all installed packages."""
    (tmp_path / "bench.py").write_text("print('the other tree')", "utf-8")
    command = [sys.executable, "-m", "bench"]
    with launch.started(command, {}, tmp_path / "output.log") as process:
        process.wait(timeout=30.0)
    assert (tmp_path / "output.log").read_text("utf-8") == "the other tree\n"
