"""`weft runner join --url` with a server that does not have the models to publish, or does not answer."""

from types import SimpleNamespace
from typing import Any, cast

import pytest

from runner_svc.dial_out import LinkEvent, LinkState
from runner_svc.runtimes.openai_http import openai_http_backend as backend
from runner_svc.runtimes.runtime import ModelFault
from weft_app.cli.join import link_reporter, warn_of_missing_models
from weft_app.compose.join import JoinPlan, config_with_server
from weft_testing.free_port import free_port

OTHER = "the server has no model llama; it has llama3.2:3b (set upstream_model)"


def joined(model: str | None) -> Any:
    """The plan of a join with a server that does not answer."""
    config = config_with_server(None, runner="ann", url=f"http://127.0.0.1:{free_port()}", model=model)
    assert config.runners is not None
    return SimpleNamespace(runner=config.runners[0], published=(model,))


def test_join_warns_of_a_server_that_lists_other_models(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(backend, "find_fault", lambda *_: ModelFault(message=OTHER, remedy="", is_reachable=True))
    warn_of_missing_models(joined("llama"))
    assert capsys.readouterr().out == f"warn llama: {OTHER}\n"


def test_join_warns_of_a_server_that_does_not_answer_when_one_model_is_named(
    capsys: pytest.CaptureFixture[str],
) -> None:
    warn_of_missing_models(joined("llama"))
    assert (said := capsys.readouterr().out).startswith("warn llama: http://127.0.0.1:")
    assert said.endswith(" does not answer: Connection refused; start the server, or correct `url`\n")


def test_join_warns_of_a_server_that_does_not_answer_when_all_models_are_published(
    capsys: pytest.CaptureFixture[str],
) -> None:
    warn_of_missing_models(joined(None))
    said = capsys.readouterr().out
    assert said == "warn ann: serves no model of its server: it does not answer; start it, or correct url\n"


def test_join_says_once_what_the_mesh_does_not_serve(capsys: pytest.CaptureFixture[str]) -> None:
    plan = SimpleNamespace(runner=SimpleNamespace(name="ann"), published=("a", "b"), shown_address="mesh:7443")
    show = link_reporter(cast("JoinPlan", plan))
    for detail in ("", "model b: taken", "model b: taken", ""):
        show(LinkEvent(state=LinkState.JOINED))
        show(LinkEvent(state=LinkState.LEFT_OUT, detail=detail))
    assert capsys.readouterr().out.splitlines() == [
        "ok   joined as ann: a, b",
        "warn not served: model b: taken",
        "ok   the mesh serves all models now",
    ]
