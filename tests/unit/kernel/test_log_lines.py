"""What stands in a line of a log."""

import io
import json
from dataclasses import dataclass, field
from typing import Any

import pytest
import structlog

from weft.kernel.telemetry.structured_logs import configure_logging


@dataclass
class _Login:
    name: str
    secret: str = field(repr=False)


def _line(**values: Any) -> dict[str, Any]:
    output = io.StringIO()
    configured = structlog.get_config()
    try:
        configure_logging("tester", file=output, form="json")
        structlog.get_logger("weft.test").info("said", **values)
    finally:
        structlog.contextvars.clear_contextvars()
        structlog.configure(**configured)
    found: dict[str, Any] = json.loads(output.getvalue())
    return found


def test_plain_values_are_logged_unchanged() -> None:
    line = _line(text="\u00e9\u4e16", number=3, share=0.5, is_set=True, nothing=None)
    assert {name: line[name] for name in ("text", "number", "share", "is_set", "nothing")} == {
        "text": "\u00e9\u4e16",
        "number": 3,
        "share": 0.5,
        "is_set": True,
        "nothing": None,
    }
    assert (line["event"], line["level"], line["service"]) == ("said", "info", "tester")


def test_field_hidden_from_repr_is_hidden_from_the_log() -> None:
    line = _line(login=_Login("ann", "hunter2"), logins=[_Login("bob", "hunter3")])
    assert "ann" in str(line)
    assert "bob" in str(line)
    assert "hunter" not in str(line)


@pytest.mark.parametrize("odd", ["half \ud800 a pair", 2**80, {"a": {1, 2}}, b"bytes", ValueError("x")])
def test_any_value_can_be_logged(odd: Any) -> None:
    assert _line(odd=odd)["event"] == "said"
