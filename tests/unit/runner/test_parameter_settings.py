"""From a model's configuration to the parameters of its engine."""

from typing import Any

import pytest

from runner_svc.policy.parameters import EngineParameters, ParameterProfile
from runner_svc.runtimes.llama_server.backend import LlamaServerBackend
from runner_svc.runtimes.llama_server.runtime import PARAMETERS as LLAMA_SERVER_PARAMETERS
from runner_svc.runtimes.openai_http.backend import AttachedServer
from runner_svc.runtimes.openai_http.runtime import PARAMETERS as OPENAI_HTTP_PARAMETERS
from weft_app.compose.served_models import served_model
from weft_app.config.loader import parse_section
from weft_app.config.runners import ConfiguredRunner


def _profile(runtime: str, **fields: Any) -> ParameterProfile:
    place = {"url": "http://box.lan:8000/v1"} if runtime == "openai_http" else {"path": "/models/m.gguf"}
    section = parse_section(
        ConfiguredRunner,
        {"name": "r1", "runtime": runtime, "command": ["server"], "models": [{"name": "m1", **place, **fields}]},
    )
    backend = served_model(section, section.models[0], 5.0).make_backend()
    assert isinstance(backend, LlamaServerBackend | AttachedServer)
    return backend.parameters


@pytest.mark.parametrize(
    ("runtime", "engine"), [("llama_server", LLAMA_SERVER_PARAMETERS), ("openai_http", OPENAI_HTTP_PARAMETERS)]
)
def test_model_has_the_configured_parameter_profile(runtime: str, engine: EngineParameters) -> None:
    assert _profile(runtime) == ParameterProfile(engine=engine)
    asked = _profile(runtime, passthrough="all", thinking=False)
    assert asked == ParameterProfile(engine=engine, passthrough=True, thinking=False)
