import pytest

from bench.contender import LITELLM, WEFT, fill
from bench.load import percentile
from bench.machine import Machine
from bench.measures import CHUNK_CPU, PLACEMENT_RATE, UNARY_CPU, UNARY_RATE, Measure
from bench.report import Figures, Report, Row, Use, markdown, share_table

MACHINE = Machine(
    date="2026-11-20T05:00:00+00:00",
    commit="abc",
    cpu="Some CPU",
    cores=2,
    memory_gib=24.0,
    kernel="Linux 6",
    python="CPython 3.11",
    load_average=0.1,
    versions={"weft": "0.1.0"},
)


def report(figures: Figures) -> Report:
    return Report(
        machine=MACHINE,
        settings={"runs": "3"},
        packages={"litellm": "litellm==1"},
        rows=figures.rows((UNARY_CPU, UNARY_RATE, CHUNK_CPU)),
        uses=figures.uses,
        skipped=["other: no such | package"],
    )


@pytest.mark.parametrize(
    ("measure", "value", "verdict"),
    [
        (Measure("x", "ms", 30), 30.0, "met"),
        (Measure("x", "ms", 30), 30.1, "missed"),
        (Measure("x", "", 0.97, at_most=False), 0.97, "met"),
        (Measure("x", "", 0.97, at_most=False), 0.96, "missed"),
    ],
)
def test_goal_is_met_at_its_limit(measure: Measure, value: float, verdict: str) -> None:
    assert measure.verdict(value) == verdict


def test_row_value_is_the_median_and_decides_the_verdict() -> None:
    row = Row(measure=CHUNK_CPU, contender="weft", samples=(90.0, 8.8, 8.6))
    assert row.value == 8.8
    assert row.verdict == "met"


def test_goals_apply_only_to_weft() -> None:
    assert Row(measure=CHUNK_CPU, contender="litellm", samples=(9000.0,)).verdict == "-"
    assert Row(measure=PLACEMENT_RATE, contender="weft", samples=(0.5,)).verdict == "missed"


def test_report_shows_goals_spread_and_skipped_contenders() -> None:
    figures = Figures()
    for value in (12.5, 11.9, 13.0):
        figures.add(CHUNK_CPU, "weft", value)
    figures.add(UNARY_RATE, "stub (direct)", 4000.0)
    figures.uses["unary", "weft"] = [Use({"host": 1.0}, 2.0, 1000, 3)]
    page = markdown(report(figures))
    title = CHUNK_CPU.title
    assert f"| {title} | 12.5 us | 11.9 to 13.0 (3) | <= 10 us | missed |  |" in page
    assert "| unary chat requests (1/s) | 4,000 |" in page
    assert "| unary | weft | host 0.50 | host 1,000.0 | 3 |" in page
    assert "- other: no such | package" in page
    assert "litellm from litellm==1" in page


def test_role_missing_from_a_run_counts_as_zero() -> None:
    runs = [Use(cpu, 1.0, 1, 0) for cpu in ({"host": 1.0}, {"host": 1.0, "runner": 1.0}, {"host": 1.0, "runner": 3.0})]
    assert "| host 1.00, runner 1.00 |" in share_table({("unary", "weft"): runs})


def test_templates_replace_names_and_keep_other_braces() -> None:
    assert fill('{"a": {port}, "b": {}}', {"port": "80"}) == '{"a": 80, "b": {}}'
    with pytest.raises(KeyError):
        fill("{nonsense}", {})


def test_every_shipped_template_can_be_rendered() -> None:
    names = ("python", "bin", "port", "spare_port", "upstream_port", "stub_python", "home", "config")
    values = dict.fromkeys(names, "x")
    for contender in (WEFT, LITELLM):
        for template in (*contender.command, contender.config, *contender.environment.values()):
            assert "{port}" not in fill(template, values)


def test_percentiles_of_few_values_are_sample_values() -> None:
    assert percentile([], 0.5) == 0.0
    assert percentile([3.0, 1.0, 2.0], 0.5) == 2.0
    assert percentile([1.0, 2.0], 0.99) == 2.0


def test_drifting_contenders_are_compared_round_by_round() -> None:
    figures = Figures()
    for drift in (1.0, 2.0, 4.0):
        figures.add(UNARY_CPU, "weft", 90.0 * drift)
        figures.add(UNARY_CPU, "before", 100.0 * drift)
    page = markdown(report(figures))
    assert f"| {UNARY_CPU.title} | before | 0.900 | 0.900 to 0.900 (3) |" in page
