"""The contenders that a run compares: their files, the counter that shows their way, and the table of ways."""

import sys
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from threading import Thread

import psutil
import pytest
import yaml
from kit.envoy import faults

from bench import launch
from bench.__main__ import contenders_of, parse_arguments
from bench.contender import ENGINE_LANE, ENVOY, LANE, LANES, PEERS, WEFT, Contender, fill
from bench.launch import STUB, LaunchError, Target, carried
from bench.load import Job, Result
from bench.machine import describe_machine
from bench.measures import ADDED_UNARY_P50, CHUNK_CPU, UNARY_CPU
from bench.report import Figures, Report, way_table
from bench.scenarios import Options, _measure_throughput, unary
from weft_app.config.loader import load_config

VALUES = {
    "port": "18080",
    "spare_port": "18081",
    "other_port": "18082",
    "upstream_port": "18083",
    "stub_python": "/usr/bin/python3",
    "config": __file__,
}


def names(*arguments: str) -> list[str]:
    return [contender.name for contender in contenders_of(parse_arguments(arguments))]


def test_peers_are_compared_with_the_gateway_and_with_both_endpoints_of_the_lane() -> None:
    lanes = ["weft-lane", "weft-lane-engine"]
    assert names("--peers") == ["weft", *lanes, "envoy", "sglang-router", "vllm-router", "litellm"]
    assert names() == ["weft"]
    assert names("--only", "weft-lane", "--only", "unary") == ["weft-lane"]


@pytest.mark.parametrize("contender", LANES)
def test_a_lane_has_keys_a_picker_and_one_worker_of_envoy(contender: Contender, tmp_path: Path) -> None:
    file = tmp_path / "weft.yaml"
    file.write_text(fill(contender.config, VALUES))
    config = load_config(file)
    assert config.auth.required
    assert (config.edge.proxy, config.edge.threads, config.picker.listen) == ("envoy", 1, "127.0.0.1:18081")
    assert config.runners is not None
    (runner,) = config.runners
    assert runner.http_port == 18082
    assert runner.models[0].lane == ("engine" if contender is ENGINE_LANE else "sidecar")


def test_the_models_of_all_ways_through_weft_are_the_same() -> None:
    found = [yaml.safe_load(fill(each.config, VALUES))["runners"][0] for each in (WEFT, *LANES)]
    assert [{key: value for key, value in each.items() if key != "http_port"} for each in found[:2]] == [found[0]] * 2
    assert found[2]["models"][0] == {**found[0]["models"][0], "lane": "engine"}


def test_bare_envoy_takes_its_configuration(tmp_path: Path) -> None:
    assert faults(yaml.safe_load(fill(ENVOY.config, VALUES)), tmp_path) == ""


def test_every_envoy_is_called_so() -> None:
    for contender in LANES:
        assert next(role for mark, role in contender.roles.items() if mark in ENVOY.command) == "envoy"
    assert ENVOY.main_role == "envoy"


def test_what_is_installed_for_peers_is_pinned() -> None:
    assert all("==" in package for peer in PEERS for package in peer.packages)


PAGE = b"""\
weft_picker_requests_total{result="lane",surface="chat"} 7.0
weft_picker_requests_total{result="lane",surface="completions"} 2.0
weft_picker_requests_total{result="gateway",surface="chat"} 5.0
"""


def test_requests_that_went_another_way_are_not_counted_for_the_lane() -> None:
    class Page(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()
            self.wfile.write(PAGE)

        def log_message(self, *_: object) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Page) as server:
        thread = Thread(target=server.handle_request)
        thread.start()
        assert carried(LANE, server.server_port) == 9.0
        thread.join()


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


def test_answers_that_went_another_way_are_failures(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    # Ten answers are received, and the counter of the lane rises by seven.
    counter = iter((100.0, 107.0))
    monkeypatch.setattr("bench.scenarios.run_load", lambda *_: DONE)
    monkeypatch.setattr(launch, "carried", lambda *_: next(counter))
    figures = Figures()
    _measure_throughput(Options(root=tmp_path, repetitions=1), figures, unary(), [target(LANE)])
    assert figures.shares()[0].failures == 3


def test_a_contender_that_is_too_slow_is_left_out_and_the_others_go_on(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
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


def test_the_table_of_ways_splits_costs_by_process() -> None:
    figures = Figures()
    for measure, value in ((UNARY_CPU, 1500.4), (CHUNK_CPU, 12.25), (ADDED_UNARY_P50, 0.5)):
        figures.add(measure, "weft-lane", value)
    costs = {"envoy": 0.1, "host": 0.5, "runner": 0.9, "backend": 0.4, "generator": 0.2}
    figures.add_use("unary", "weft-lane", cpu_seconds=costs, wall_seconds=1.0, units=1_000, failures=2)
    figures.add_use("stream", "weft-lane", cpu_seconds=costs, wall_seconds=1.0, units=100_000, failures=0)
    figures.add_use("unary", STUB.name, cpu_seconds={"backend": 0.4}, wall_seconds=1.0, units=1_000, failures=0)
    report = Report(
        machine=describe_machine(Path(__file__).parent),
        settings={},
        packages={},
        rows=figures.rows((UNARY_CPU, CHUNK_CPU, ADDED_UNARY_P50)),
        shares=figures.shares(),
    )
    page = way_table(report)
    expected = (
        "| weft-lane | 1,500 | envoy 100, host 500, runner 900 | 12.2 | envoy 1.0, host 5.0, runner 9.0 | 0.50 | 2 |"
    )
    assert expected in page
    assert "| stub (direct) | - | backend 400 | - | - | - | 0 |" in page


def test_a_process_of_another_tree_of_weft_does_not_run_this_one(tmp_path: Path) -> None:
    """`python -m` puts its own folder before all installed packages."""
    (tmp_path / "bench.py").write_text("print('the other tree')", "utf-8")
    command = [sys.executable, "-m", "bench"]
    with launch.started(command, {}, tmp_path / "output.log") as process:
        process.wait(timeout=30.0)
    assert (tmp_path / "output.log").read_text("utf-8") == "the other tree\n"
