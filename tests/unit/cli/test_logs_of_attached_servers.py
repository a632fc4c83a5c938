"""`weft logs` of a model whose output is not ours."""

from collections.abc import Iterator
from http.client import HTTPConnection
from typing import Any

import pytest
from typer.testing import CliRunner
from typing_extensions import override

from weft_app.cli.main import app
from weft_app.cli.mesh_api import MeshApi


class Mesh(MeshApi):
    """A mesh with one model."""

    runtime = "openai_http"

    def __init__(self) -> None:
        super().__init__(HTTPConnection("nowhere"), "nowhere", "")

    @override
    def get(self, path: str, **_: Any) -> Any:
        log = {"lines": [] if self.runtime == "openai_http" else ["a line of the engine"]}
        return log if path.endswith("/logs") else {"name": "llama", "status": {"runner": "r1", "runtime": self.runtime}}

    @override
    def stream(self, path: str, deadline: float | None = None, **query: Any) -> Iterator[Any]:
        yield self.get(path)


@pytest.mark.parametrize("follow", [[], ["-f"]])
def test_logs_command_for_an_attached_server_explains_where_its_output_is(
    monkeypatch: pytest.MonkeyPatch, follow: list[str]
) -> None:
    """It printed nothing, and the exit status was 0."""
    mesh = Mesh()
    monkeypatch.setattr("weft_app.cli.logs.connect", lambda *_: mesh)
    done = CliRunner().invoke(app, ["logs", "llama", *follow])
    assert done.exit_code == 0
    assert "llama: weft did not start this server; its output is where it was started" in done.stderr
    mesh.runtime = "llama_server"
    assert CliRunner().invoke(app, ["logs", "llama", *follow]).stdout == "a line of the engine\n"
