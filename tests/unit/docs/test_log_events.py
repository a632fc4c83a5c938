"""The table of log events has every event, as the code writes it."""

import re
from typing import Any

import pytest
from reference_pages import log_events

CALL = re.compile(r"\blog\s*\.")
"""What a source that logs has in its text. Parsing the others takes seconds."""


@pytest.fixture(scope="module")
def events() -> dict[str, Any]:
    """Returns all events. Each source that logs is parsed once."""
    texts = (each.read_text("utf-8") for each in log_events.sources())
    found: dict[str, Any] = log_events.events_of(text for text in texts if CALL.search(text))
    return found


def test_table_lists_the_events_that_the_code_logs(events: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(log_events, "events_of", lambda _: events)
    page = log_events.page()
    assert len(events) > 100
    assert [name for name in events if f"| {name.replace('|', ' ')} |" not in page] == []


def test_undocumented_event_is_detected() -> None:
    """The control: a call with its level, its component and its fields, and one of another object, which is none."""
    source = 'log = get_logger("weft.x")\nlog.exception("it broke", model=1)\nother.info("not ours")\n'
    (name, event), *more = log_events.events_of([source]).items()
    assert more == []
    assert (name, event.levels, event.components, event.fields) == ("it broke", {"error"}, {"weft.x"}, {"model"})


def test_event_fields_do_not_shadow_common_fields(events: dict[str, Any]) -> None:
    taken = {"timestamp", "level", "service", "component", "event"}
    assert {name for name, event in events.items() if event.fields & taken} == set()
