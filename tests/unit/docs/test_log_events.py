"""docs/logs.md has every event of the log, as the code writes it."""

import importlib.util
import re
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

ROOT = Path(__file__).parents[3]
CALL = re.compile(r"\blog\s*\.")
"""What a source that logs has in its text. Parsing the others takes seconds."""


@pytest.fixture(scope="module")
def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("log_events", ROOT / "docs" / "site" / "log_events.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # where its dataclass looks for its annotations
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def events(script: ModuleType) -> dict[str, Any]:
    """Returns all events. Each source that logs is parsed once."""
    texts = (each.read_text("utf-8") for each in script.sources())
    found: dict[str, Any] = script.events_of(text for text in texts if CALL.search(text))
    return found


def test_the_documentation_has_the_events_that_the_code_logs(
    script: ModuleType, events: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(script, "events_of", lambda _: events)
    page = (ROOT / "docs" / "logs.md").read_text("utf-8")
    written = page.partition(script.BEGIN)[2].partition(script.END)[0]
    assert written.strip() == script.table(), "run make docs"


def test_an_event_that_is_not_documented_is_found(script: ModuleType) -> None:
    """The control: a call with its level, its component and its fields, and one of another object, which is none."""
    source = 'log = get_logger("weft.x")\nlog.exception("it broke", model=1)\nother.info("not ours")\n'
    (name, event), *more = script.events_of([source]).items()
    assert more == []
    assert (name, event.levels, event.components, event.fields) == ("it broke", {"error"}, {"weft.x"}, {"model"})


def test_no_field_of_an_event_replaces_one_that_every_line_has(events: dict[str, Any]) -> None:
    taken = {"timestamp", "level", "service", "component", "event"}
    assert {name for name, event in events.items() if event.fields & taken} == set()
