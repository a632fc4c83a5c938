"""Dashboards and alerts ask for metrics that exist, and are what their code says."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from boards import BOARDS
from boards.board import Board
from boards.grafana import board_json
from kit.promql import Series, selectors, unmatched
from reference_pages.metrics import page as reference_page

ROOT = Path(__file__).parents[3]
FOLDER = ROOT / "deploy" / "observability"
RUNBOOKS = ROOT / "docs" / "observe.md"
MAX_TARGETS = 8
"""A panel's queries are named A to H."""


def _alerts() -> list[dict[str, Any]]:
    (group,) = yaml.safe_load((FOLDER / "alerts.yaml").read_text("utf-8"))["groups"]
    return list(group["rules"])


def _tests() -> list[dict[str, Any]]:
    tests = yaml.safe_load((FOLDER / "alerts_test.yaml").read_text("utf-8"))["tests"]
    return [case for test in tests for case in test["alert_rule_test"]]


@pytest.fixture(scope="module")
def documented() -> set[str]:
    """The metrics of the reference, without the endings of counters."""
    names = re.findall(r"`((?:weft|gen_ai|process|vllm|llamacpp)[a-z0-9_:]+)", reference_page())
    return {name.removesuffix("_total") for name in names}


def _undocumented(expression: str, documented: set[str]) -> list[str]:
    return [found.family for found in selectors(expression) if found.family not in documented]


@pytest.mark.parametrize("board", BOARDS, ids=lambda board: board.uid)
def test_dashboard_file_matches_its_code(board: Board) -> None:
    file = FOLDER / "dashboards" / f"{board.uid}.json"
    assert file.read_text("utf-8") == board_json(board), "run: make dashboards"


def test_folder_contains_only_dashboards() -> None:
    assert {file.stem for file in (FOLDER / "dashboards").iterdir()} == {board.uid for board in BOARDS}


@pytest.mark.parametrize("board", BOARDS, ids=lambda board: board.uid)
def test_every_panel_uses_documented_metrics(board: Board, documented: set[str]) -> None:
    for panel in board.panels:
        assert 0 < len(panel.queries) <= MAX_TARGETS
        for query in panel.queries:
            assert selectors(query.expression), panel.title
            assert not _undocumented(query.expression, documented), panel.title


def test_every_alert_uses_documented_metrics_and_has_a_runbook(documented: set[str]) -> None:
    headings = set(re.findall(r"^### (Weft\w+)$", RUNBOOKS.read_text("utf-8"), re.MULTILINE))
    for alert in _alerts():
        assert not _undocumented(alert["expr"], documented), alert["alert"]
        assert alert["annotations"]["runbook"] == f"docs/observe.md#{alert['alert'].lower()}"
    assert headings == {alert["alert"] for alert in _alerts()}


def test_every_alert_is_tested_firing_and_silent() -> None:
    names = [alert["alert"] for alert in _alerts()]
    firing = [case["alertname"] for case in _tests() if case.get("exp_alerts")]
    silent = [case["alertname"] for case in _tests() if not case.get("exp_alerts")]
    assert sorted(firing) == sorted(silent) == sorted(names)


def test_undocumented_metric_is_detected(documented: set[str]) -> None:
    assert _undocumented("rate(weft_router_grants_of_yesterday_total[5m])", documented) == [
        "weft_router_grants_of_yesterday"
    ]


@pytest.mark.parametrize("expression", ["sum by (model (x)", "rate(x)", "x{model=}"])
def test_unparseable_expression_is_detected(expression: str) -> None:
    with pytest.raises(ValueError, match=r".+"):
        selectors(expression)


@pytest.mark.parametrize(
    ("expression", "is_found"),
    [
        ("x_total", True),
        ("y_total", False),
        ('x_total{model="qwen"}', True),
        ('x_total{model!="qwen"}', False),
        ('x_total{model=~"q.*|z"}', True),
        ('x_total{model!~"q.*"}', False),
        ('x_total{model=~"q"}', False),
        ('x_total{pool=""}', True),
        ('x_total{instance="box", job="weft"}', True),
        ('x_total{model=~"$model"}', True),
        ("x_total > up", True),
    ],
)
def test_selector_is_resolved_like_in_prometheus(expression: str, is_found: bool) -> None:
    series = [Series("x_total", {"model": "qwen"})]
    assert (not unmatched([expression], series)) == is_found


def test_dashboard_rows_are_full() -> None:
    for board in BOARDS:
        for section in board.sections:
            assert sum(panel.width for panel in section.panels) % 24 == 0, (board.uid, section.title)


def test_dashboard_follows_the_selected_source_and_model() -> None:
    made = json.loads(board_json(BOARDS[0]))
    assert [variable["name"] for variable in made["templating"]["list"]] == ["source", "model"]
    assert made["templating"]["list"][1]["current"]["value"] == "$__all"
    assert {panel["datasource"]["uid"] for panel in made["panels"] if panel["type"] != "row"} == {"${source}"}
