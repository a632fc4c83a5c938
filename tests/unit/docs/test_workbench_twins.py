"""The workbench uses the public API alone, and all that it changes has a command, as its design note lists."""

import re
from dataclasses import dataclass
from pathlib import Path

import pytest
from typer.core import TyperGroup

from gateway.endpoints import gateway_routers
from gateway.routing import routes_of
from gateway.workbench.page_files import FOLDER
from weft.extension import own_extensions
from weft_app.cli.commands import COMMANDS
from weft_app.cli.keys import KeyRole, scopes_of
from weft_app.cli.main import load, loaded_commands

PAGE = Path(__file__).parents[3] / "gateway" / "workbench" / "DESIGN.md"
_LITERAL = re.compile(
    r"""(?:(?P<function>\w+)\(\s*(?:"(?P<method>[A-Z]+)",\s*)?)?"""
    r"""(?P<quote>["`])(?P<path>/(?:api/)?v1/.*?)(?P=quote)"""
)
_METHODS = {"get": "GET", "post": "POST", "put": "PUT", "remove": "DELETE"}
"""Functions of api.js whose name says the method; others are given it."""
_ROW = re.compile(
    r"^\|[^|]*\|[^|]*\| `(?P<method>[A-Z]+) (?P<path>\S+)` \| `weft (?P<command>[^`]+)` \|$", re.MULTILINE
)
_ENDPOINTS = [
    (method, re.sub(r"\{.*?\}", "x", route.path))
    for route in routes_of(gateway_routers(own_extensions()))
    for method in route.methods or ()
]
"""Methods and paths of the gateway, with "x" for what a caller puts in."""


_READING = {("POST", "/v1/tokenize"), ("POST", "/api/v1/pdf-text")}
"""They change nothing: a text or a file in a query would be too long."""


@dataclass(frozen=True, slots=True)
class Call:
    """A path that a module of the page names, and the method where the same line says it."""

    module: str
    method: str | None
    path: str

    def endpoints(self) -> list[tuple[str, str]]:
        """The endpoints that it may be."""
        pattern = re.compile(re.sub(r"\\\$\\\{.*?\\\}", "[^/]+", re.escape(self.path.split("?")[0])))
        found = [(method, path) for method, path in _ENDPOINTS if pattern.fullmatch(path)]
        return [(method, path) for method, path in found if self.method in (None, method)]


def calls_of(text: str, module: str = "") -> list[Call]:
    """The paths of the API in the text of a module."""
    return [
        Call(module, found["method"] or _METHODS.get(found["function"] or ""), found["path"])
        for found in _LITERAL.finditer(text)
    ]


def rows() -> list[tuple[str, str, str]]:
    """Method, path and command of each row of the table."""
    found = _ROW.finditer(PAGE.read_text())
    return [(row["method"], re.sub(r"\{.*?\}", "x", row["path"]), row["command"]) for row in found]


PATHS = [*(FOLDER / "app").rglob("*.js"), *FOLDER.parents[2].glob("weft_extensions/*/page/*.js")]
CALLS = [call for path in sorted(PATHS) for call in calls_of(path.read_text(), path.name)]


def test_page_uses_public_api_endpoints_only() -> None:
    assert CALLS
    unknown = [call for call in CALLS if not call.endpoints()]
    assert not unknown, "no endpoint of the gateway has this method and path"


def test_every_change_made_by_the_page_is_in_the_table_of_calls_and_commands() -> None:
    listed = {(method, path) for method, path, _ in rows()} | _READING
    changing = {call: {each for each in call.endpoints() if each[0] not in ("GET", "HEAD")} for call in CALLS}
    missing = [call for call, endpoints in changing.items() if endpoints and not endpoints & listed]
    assert not missing, f"add a row to 'Calls and commands' in {PAGE.name}"


@pytest.mark.parametrize(("method", "path", "command"), rows())
def test_every_table_row_is_an_endpoint_and_a_command(method: str, path: str, command: str) -> None:
    assert (method, path) in _ENDPOINTS
    name, *words = command.split()
    assert name in COMMANDS
    found = load(name)
    while isinstance(found, TyperGroup) and words:
        word = words.pop(0)
        found, name = loaded_commands(name, found)[word], f"{name} {word}"
    options = {option for parameter in found.params for option in parameter.opts}
    assert {word for word in words if word.startswith("--")} <= options


def test_path_without_an_endpoint_is_detected() -> None:
    """The negative control of the checks above."""
    wrong = calls_of("get(`/v1/admin/nothing/${segment(name)}`); post('x'); post(\"/v1/admin/models\")")
    assert [bool(call.endpoints()) for call in wrong] == [False, True]
    assert calls_of('events("GET", `/v1/admin/operations/${segment(id)}`, {})')[0].endpoints() == [
        ("GET", "/v1/admin/operations/x")
    ]
    assert not calls_of('put("/v1/admin/pulls", {})')[0].endpoints()


def test_page_roles_match_the_command_line_roles() -> None:
    text = (FOLDER / "app" / "pages" / "settings_keys.js").read_text()
    found = {
        name: tuple(re.findall(r'"([^"]+)"', scopes))
        for name, scopes in re.findall(r"^  (\w+): \[(.*)\],$", text, re.MULTILINE)
    }
    # A service is no caller that somebody makes a key for in a browser.
    assert found == {role.value: scopes_of(role) for role in KeyRole if role is not KeyRole.SERVICE}
