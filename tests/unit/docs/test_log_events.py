"""docs/logs.md has every event of the log, as the code writes it."""

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

ROOT = Path(__file__).parents[3]


def _script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("log_events", ROOT / "docs" / "site" / "log_events.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # where its dataclass looks for its annotations
    spec.loader.exec_module(module)
    return module


def test_the_documentation_has_the_events_that_the_code_logs() -> None:
    script = _script()
    page = (ROOT / "docs" / "logs.md").read_text("utf-8")
    written = page.partition(script.BEGIN)[2].partition(script.END)[0]
    assert written.strip() == script.table(), "run make docs"


def test_an_event_that_is_not_documented_is_found() -> None:
    """The control: a call with its level, its component and its fields, and one of another object, which is none."""
    source = 'log = get_logger("weft.x")\nlog.exception("it broke", model=1)\nother.info("not ours")\n'
    (name, event), *more = _script().events_of([source]).items()
    assert more == []
    assert (name, event.levels, event.components, event.fields) == ("it broke", {"error"}, {"weft.x"}, {"model"})


def test_no_field_of_an_event_replaces_one_that_every_line_has() -> None:
    taken = {"timestamp", "level", "service", "component", "event"}
    script = _script()
    events = script.events_of(each.read_text("utf-8") for each in script.sources())
    assert {name for name, event in events.items() if event.fields & taken} == set()
