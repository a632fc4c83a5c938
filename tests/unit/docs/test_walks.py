"""docs/architecture.md draws four walks through the data, each station a module and the name in it."""

import ast
import re
from pathlib import Path

ROOT = Path(__file__).parents[3]
MAX_STATIONS = 8
WALKS = ("One chat request", "One heartbeat", "One task", "One load")
_STATION = re.compile(r"^[a-z]* +(?P<number>\d) (?P<path>\w+(?:/\w+)+\.py) +(?P<name>\w+) ", re.MULTILINE)
_CALL = re.compile(r"^ +│ (?P<message>[A-Z]\w+)", re.MULTILINE)


def _walk(title: str) -> str:
    return (ROOT / "docs" / "architecture.md").read_text("utf-8").partition(f"### {title}\n")[2].partition("\n#")[0]


def _is_defined(path: str, name: str) -> bool:
    file = ROOT / path
    if not file.is_file():
        return False
    kinds = (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    return any(isinstance(node, kinds) and node.name == name for node in ast.parse(file.read_text("utf-8")).body)


def test_no_walk_has_more_than_eight_stations() -> None:
    for title in WALKS:
        numbers = [int(station["number"]) for station in _STATION.finditer(_walk(title))]
        assert numbers == list(range(1, len(numbers) + 1)), title
        assert 4 <= len(numbers) <= MAX_STATIONS, title


def test_each_station_is_a_module_that_defines_the_name_beside_it() -> None:
    stations = [(found["path"], found["name"]) for title in WALKS for found in _STATION.finditer(_walk(title))]
    assert [station for station in stations if not _is_defined(*station)] == []


def test_each_call_between_processes_uses_a_contract_message() -> None:
    protos = "".join(path.read_text("utf-8") for path in (ROOT / "protos").rglob("*.proto"))
    messages = {found["message"] for title in WALKS for found in _CALL.finditer(_walk(title))}
    assert len(messages) >= 10
    assert {message for message in messages if not re.search(rf"\bmessage {message} ", protos)} == set()


def test_missing_station_is_detected() -> None:
    """The control: a module that has gone, and a name that its module does not define."""
    assert not _is_defined("registry_svc/mesh/roster.py", "Roster")
    assert not _is_defined("router_svc/loop.py", "Roster")
