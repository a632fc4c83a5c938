"""The reference is generated from code, and has all that the code defines."""

import pytest
from reference_pages import commands, errors, metrics, parameters

from runner_svc.runtimes.table import built_in
from weft.kernel.errors.reasons import Reason
from weft_app.cli.commands import COMMANDS


def test_every_reason_has_a_meaning_and_codes() -> None:
    page = errors.page()
    assert [reason.name for reason in list(Reason)[1:] if f"| `{reason.name.lower()}` |" not in page] == []
    assert (
        "| `queue_full` | The queue of the model's pool is full. | 503 | RESOURCE_EXHAUSTED | yes | yes | 1 |" in page
    )


def test_every_command_has_a_section() -> None:
    page = commands.page()
    assert [name for name in COMMANDS if f"### weft {name}\n" not in page] == []
    assert "### weft keys create\n" in page


def test_every_engine_parameter_has_a_row() -> None:
    page = parameters.page()
    names = {name for runtime in built_in() for name in runtime.parameters.allowed}
    assert [name for name in names if f"| `{name}` |" not in page] == []


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ('page.gauge("weft_a", "The a of it.", ("host",), ())', ("weft_a", ("host",))),
        (
            '_T = (("weft_a", "The a."),)\nfor name, meaning in _T:\n    page.gauge(name, meaning, ("pool",), ())',
            ("weft_a", ("pool",)),
        ),
        ('_M = ("model",)\npage.count("weft_a", "The a of it.", (*_M, "reason"), ())', ("weft_a", ("model", "reason"))),
    ],
)
def test_metric_is_found_with_its_labels(source: str, found: tuple[str, tuple[str, ...]]) -> None:
    assert [(each.name, each.labels) for each in metrics.metrics_of(source)] == [found]
