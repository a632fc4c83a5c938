"""Scenario files, and the command that runs them."""

import json
import os
import pty
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from router_svc.policy.limits import SchedulerLimits
from weft.kernel.errors.error_tree import FieldError
from weft.kernel.requests.request_values import Priority
from weft_app.cli.main import app
from weft_extensions.simulate.scenario import GIBIBYTE, Delays
from weft_extensions.simulate.scenario_file import load_scenario, parse_scenario

SCENARIOS = sorted((Path(__file__).parents[3] / "examples" / "scenarios").glob("*.yaml"))


def document(**changes: Any) -> dict[str, Any]:
    return {
        "name": "small",
        "hosts": [{"name": "gpu", "memory_gib": 8}],
        "models": [{"name": "m", "memory_gib": 5, "load_seconds": 2, "loaded": True}],
        "tenants": [{"name": "t"}],
        "arrivals": [{"tenant": "t", "target": "m", "rate": 1.0}],
        "duration_seconds": 20.0,
        **changes,
    }


def run(*arguments: str) -> Any:
    return CliRunner().invoke(app, ["mesh", "simulate", *arguments])


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "small.yaml"
    path.write_text(yaml.safe_dump(document()))
    return path


def test_scenarios_range_from_a_laptop_to_ten_thousand_runners() -> None:
    names = {path.stem for path in SCENARIOS}
    assert {"laptop", "ten-thousand-runners", "three-tenants", "lab", "overload", "outage", "cloud-fallback"} <= names


@pytest.mark.parametrize("path", SCENARIOS, ids=lambda path: path.stem)
def test_every_shipped_scenario_is_readable_and_has_a_description(path: Path) -> None:
    scenario = load_scenario(path)
    assert scenario.name == path.stem
    assert len(scenario.description) > 40


def test_file_without_limits_uses_the_router_defaults() -> None:
    scenario = parse_scenario(document(), "x")
    assert scenario.limits == SchedulerLimits()
    assert scenario.delays == Delays()
    assert scenario.models[0].memory_bytes == 5 * GIBIBYTE


def test_priorities_map_to_priority_classes() -> None:
    tenants = [{"name": "t", "priorities": {"high": 1, "low": 3, "normal": 0}}]
    assert parse_scenario(document(tenants=tenants), "x").tenants[0].priorities == {Priority.HIGH: 1, Priority.LOW: 3}


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"colour": "red"}, "colour"),
        ({"hosts": [{"name": "gpu", "memory": 8}]}, "hosts.0.memory"),
        ({"hosts": [{"name": "gpu", "count": 1_000_000}]}, "hosts.0.count"),
        ({"models": []}, "models"),
        ({"models": [{"name": "m", "slots": 0}]}, "models.0.slots"),
        ({"models": [{"name": "m", "hosts": ["nowhere"]}]}, "models.0.hosts"),
        ({"models": [{"name": "m", "remote": True, "memory_gib": 3}]}, "models.0"),
        ({"models": [{"name": "m", "load_seconds": {"mean": 3, "variance": 1}}]}, "models.0.load_seconds"),
        ({"tenants": [{"name": "t", "weight": 0}]}, "tenants.0.weight"),
        ({"tenants": [{"name": "t", "allow_remote": "perhaps"}]}, "tenants.0.allow_remote"),
        ({"tenants": [{"name": "t", "priorities": {"urgent": 1}}]}, "tenants.0.priorities"),
        ({"arrivals": [{"tenant": "x", "target": "m", "rate": 1}]}, "arrivals.0.tenant"),
        ({"arrivals": [{"tenant": "t", "target": "x", "rate": 1}]}, "arrivals.0.target"),
        ({"arrivals": [{"tenant": "t", "target": "route/x", "rate": 1}]}, "arrivals.0.target"),
        ({"arrivals": [{"tenant": "t", "target": "m", "rate": 0}]}, "arrivals.0.rate"),
        ({"arrivals": [{"tenant": "t", "target": "m", "rate": "often"}]}, "arrivals.0.rate"),
        ({"routes": [{"name": "r", "candidates": ["x"]}]}, "routes.0.candidates"),
        ({"routes": [{"name": "r", "candidates": ["m"], "conditions": [{"candidate": "x"}]}]}, "routes.0.conditions"),
        ({"routes": [{"name": "r", "candidates": ["m"]}] * 2}, "routes: names must be unique: r"),
        ({"failures": [{"mode": "explodes", "at_seconds": 1, "for_seconds": 1}]}, "failures.0.mode"),
        ({"failures": [{"mode": "dies", "hosts": ["x"], "at_seconds": 1, "for_seconds": 1}]}, "failures.0.hosts"),
        ({"router": {"patience": 1}}, "router.patience"),
        ({"delays": {"report_seconds": -1}}, "delays.report_seconds"),
        ({"duration_seconds": float("inf")}, "duration_seconds"),
        ({"seed": -1}, "seed"),
        ({"requests": 10**9}, "requests"),
        ({"hosts": [{"name": "gpu"}, {"name": "gpu"}]}, "hosts"),
        ({"arrivals": [{"tenant": "t", "target": "m"}]}, "arrivals.0"),
        ({"arrivals": [{"tenant": "t", "target": "m", "rate": 1.0, "trace": "x"}]}, "arrivals.0"),
    ],
)
def test_invalid_field_error_names_it(changes: dict[str, Any], field: str) -> None:
    with pytest.raises(FieldError) as refused:
        parse_scenario(document(**changes), "the file")
    assert field in refused.value.message
    assert "the file" in refused.value.message


@pytest.mark.parametrize(
    ("model", "words"),
    [
        (
            {"load_seconds": {"mean": 3, "variance": 1}},
            "models.0.load_seconds.variance: there is no such field",
        ),
        ({"load_seconds": {"mean": -3}}, "models.0.load_seconds.mean: must be greater than 0"),
        ({"load_seconds": -3}, "models.0.load_seconds: must be greater than 0"),
        ({"load_seconds": "long"}, "models.0.load_seconds: must be a number"),
    ],
)
def test_invalid_amount_error_shows_it_as_written(model: dict[str, Any], words: str) -> None:
    """The path named a type of our own code, and of a mapping it was said that it is no number."""
    with pytest.raises(FieldError) as refused:
        parse_scenario(document(models=[{"name": "m", **model}]), "the file")
    assert f"{refused.value.field}: {refused.value.message}".endswith(f"{words} (in the file)")


ONE_MAPPING = "must be a mapping of names to values, in one document"


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("a: [", "not YAML"),
        ("", ONE_MAPPING),
        ("- a", ONE_MAPPING),
        ("name: a\n---\nname: b\n", ONE_MAPPING),
        ("hosts: []\nhosts: []\n", r"the key 'hosts' appears twice \(line "),
    ],
)
def test_invalid_scenario_file_is_refused(tmp_path: Path, text: str, why: str) -> None:
    path = tmp_path / "x.yaml"
    path.write_text(text)
    with pytest.raises(FieldError, match=why):
        load_scenario(path)


def test_file_without_an_end_is_refused() -> None:
    with pytest.raises(FieldError, match="is larger than"):
        load_scenario(Path("/dev/zero"))


def traced(tmp_path: Path, **changes: Any) -> Path:
    line = {"timestamp": 1_500, "input_length": 600, "output_length": 5, "hash_ids": [1, 2], "type": "text"}
    (tmp_path / "trace.jsonl").write_text(json.dumps(line | changes) + "\n" + json.dumps(line | {"timestamp": 500}))
    path = tmp_path / "traced.yaml"
    arrivals = [{"tenant": "t", "target": "m", "trace": "trace.jsonl"}]
    path.write_text(yaml.safe_dump(document(arrivals=arrivals)))
    return path


def test_trace_is_read_in_the_format_of_mooncake_and_sorted(tmp_path: Path) -> None:
    (traffic,) = load_scenario(traced(tmp_path)).traffic
    assert [each.at_seconds for each in traffic.recorded] == [0.5, 1.5]
    assert [each.blocks for each in traffic.recorded] == [(1, 2), (1, 2)]


@pytest.mark.parametrize("changes", [{"hash_ids": [1]}, {"input_length": 0}, {"timestamp": "early"}])
def test_invalid_trace_is_refused_with_its_name(tmp_path: Path, changes: dict[str, Any]) -> None:
    with pytest.raises(FieldError, match=r"trace\.jsonl"):
        load_scenario(traced(tmp_path, **changes))


def test_trace_above_the_limit_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("weft_extensions.simulate.scenario_file.MAX_TRACE_BYTES", 10)
    with pytest.raises(FieldError, match="larger than 10 bytes"):
        load_scenario(traced(tmp_path))


def test_missing_trace_is_refused(tmp_path: Path) -> None:
    path = traced(tmp_path)
    (tmp_path / "trace.jsonl").unlink()
    assert "trace.jsonl" in run(str(path)).stderr


def test_command_compares_policies(tmp_path: Path) -> None:
    ended = run(str(traced(tmp_path)), "--against", "fifo", "--against", "least_loaded")
    assert ended.exit_code == 0, ended.output
    assert "WEFT" in ended.stdout
    assert "FIFO" in ended.stdout
    assert "LEAST_LOADED" in ended.stdout
    assert "prompt tokens cached" in ended.stdout


def test_command_shows_tables_for_both_schedulers(path: Path) -> None:
    ended = run(str(path), "--against", "fifo", "--check")
    assert ended.exit_code == 0, ended.output
    for word in ("WEFT", "FIFO", "fairness (Jain)", "tenant t", "target m", "band normal"):
        assert word in ended.output


def test_command_prints_a_document(path: Path) -> None:
    ended = run(str(path), "-o", "json", "--seed", "7", "--requests", "5", "--explain", "2")
    assert ended.exit_code == 0, ended.output
    printed = json.loads(ended.stdout)
    assert printed["seed"] == 7
    figures = printed["schedulers"]["weft"]
    assert figures["isComplete"] is True
    assert figures["total"]["requests"] == figures["total"]["served"] == 5
    assert [step["event"].split()[0] for step in printed["explained"]["2"]][-1] == "served"


def test_more_load_gives_more_requests(path: Path) -> None:
    once, thrice = (
        json.loads(run(str(path), "-o", "json", "--load", load).stdout)["schedulers"]["weft"]["total"]["requests"]
        for load in ("1", "3")
    )
    assert thrice > 2 * once


def test_decision_log_has_the_outcome_of_a_request(path: Path) -> None:
    ended = run(str(path), "--explain", "1", "--explain", "9999")
    assert "request 1\n" in ended.stdout
    assert "attempt 1 on m" in ended.stdout
    assert "there was no such request" in ended.stdout


def test_invalid_file_error_names_the_field(tmp_path: Path) -> None:
    path = tmp_path / "wrong.yaml"
    path.write_text(yaml.safe_dump(document(tenants=[{"name": "t", "wait": 1}])))
    ended = run(str(path))
    assert ended.exit_code == 2
    assert "tenants.0.wait" in ended.output


def test_models_may_be_written_as_nested_yaml_merges(tmp_path: Path) -> None:
    path = tmp_path / "merged.yaml"
    rest = yaml.safe_dump({key: value for key, value in document().items() if key != "models"})
    path.write_text(
        rest + "models:\n- &a {name: m, memory_gib: 5, load_seconds: 2}\n- &b {<<: *a, name: n, slots: 3}\n"
        "- {<<: *b, name: o, load_seconds: 4}\n"
    )
    found = load_scenario(path).models
    assert [(each.name, each.slots, each.memory_bytes) for each in found][1:] == [
        ("n", 3, 5 * GIBIBYTE),
        ("o", 3, 5 * GIBIBYTE),
    ]


@pytest.mark.slow("starts weft mesh simulate")
def test_ctrl_c_shows_partial_figures(tmp_path: Path) -> None:
    path = tmp_path / "long.yaml"
    path.write_text(yaml.safe_dump(document(duration_seconds=10_000_000.0, arrivals=busy_arrivals())))
    ours, theirs = pty.openpty()
    command = [sys.executable, "-m", "weft_app.cli.main", "mesh", "simulate", str(path), "-o", "json"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=theirs, text=True) as process:
        try:
            told = b""
            while b"simulated" not in told:
                told += os.read(ours, 1024)
            process.send_signal(signal.SIGINT)
            printed, _ = process.communicate(timeout=30)
        finally:
            process.kill()
            os.close(ours)
            os.close(theirs)
    assert process.returncode == 130
    figures = json.loads(printed)["schedulers"]["weft"]
    assert figures["isComplete"] is False
    assert figures["total"]["served"] > 0


def busy_arrivals() -> list[dict[str, Any]]:
    return [{"tenant": "t", "target": "m", "rate": 0.5, "output_tokens": 10}]
