"""`weft runner join --url` with a server that has other models than the one that it is to publish."""

from types import SimpleNamespace
from typing import Any

import pytest

from runner_svc.runtimes.openai_http import backend
from runner_svc.runtimes.runtime import ModelFault
from runner_svc.runtimes.table import require_runtime
from weft_app.cli.runner import _warn_of_other_models


@pytest.mark.parametrize(("is_there", "runtime", "warns"), [
    (True, "openai_http", True), (False, "openai_http", False), (True, "llama_server", False),
])  # fmt: skip
def test_a_server_that_lists_other_models_is_named_at_the_terminal_before_it_joins(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *, is_there: bool, runtime: str, warns: bool
) -> None:
    words = "the server has no model llama; it has llama3.2:3b (set upstream_model)"
    fault = ModelFault(message=words, remedy="", is_there=is_there)
    monkeypatch.setattr(backend, "find_fault", lambda *_: fault)
    models = [SimpleNamespace(name=name, upstream_model=None) for name in ("llama", "not published")]
    plan: Any = SimpleNamespace(
        runner=SimpleNamespace(models=models, engine=require_runtime(runtime)), published=("llama",)
    )
    _warn_of_other_models(plan)
    assert capsys.readouterr().out == (f"warn llama: {words}\n" if warns else "")
