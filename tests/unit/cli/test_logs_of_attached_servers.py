"""`weft logs` of a model whose output is not ours."""

from types import SimpleNamespace
from typing import Any, Self

import pytest
from typer.testing import CliRunner

from weft_app.cli.main import app


class Client:
    """Stands for the clients of registry and runner."""

    runtime = "openai_http"

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        """Nothing to close."""

    def log_lines(self, *_: Any, **__: Any) -> list[SimpleNamespace]:
        return [SimpleNamespace(lost_line_count=0, lines=["a line of the engine"])]


@pytest.mark.parametrize("follow", [[], ["-f"]])
def test_logs_of_an_attached_server_say_where_its_output_is(monkeypatch: pytest.MonkeyPatch, follow: list[str]) -> None:
    """It printed nothing, and the exit status was 0."""
    client = Client()
    monkeypatch.setattr("weft_app.cli.logs.connect_registry", lambda **_: client)
    monkeypatch.setattr("weft_app.cli.logs.connect_runner_of", lambda *_: client)
    done = CliRunner().invoke(app, ["logs", "llama", *follow])
    assert done.exit_code == 0
    assert "llama: weft did not start this server; its output is where it was started" in done.stderr
    client.runtime = "llama_server"
    assert CliRunner().invoke(app, ["logs", "llama", *follow]).stdout == "a line of the engine\n"
