"""Which variables of a runner's environment a request to attach a server may name."""

from typing import Any

import pytest

from runner_svc.openai_upstream.server_probes import ServerProbes
from weft.api.runner.v1 import added_model_pb2
from weft.kernel.errors.error_tree import FieldError
from weft.kernel.errors.reasons import Reason
from weft_app.compose.followed_servers import attached_server
from weft_app.config.loader import parse_section
from weft_app.config.runners import ConfiguredRunner


def _attach(variable: str) -> None:
    model = {"name": "own", "url": "http://127.0.0.1:9/v1", "api_key_env": "OWN_KEY"}
    section = parse_section(
        ConfiguredRunner, {"name": "r", "runtime": "openai_http", "models": [model], "key_variables": ["BOX_KEY"]}
    )
    added = added_model_pb2.AddedModel(name="box", stored_source="http://127.0.0.1:8/v1")
    added.server.api_key_env = variable

    def build(*_: Any) -> Any:
        raise AssertionError("no model is served yet")

    attached_server(section, build, ServerProbes(), added)


@pytest.mark.parametrize("variable", ["", "BOX_KEY", "WEFT_KEY_BOX"])
def test_request_may_name_a_listed_variable_and_those_with_the_prefix(variable: str) -> None:
    _attach(variable)


@pytest.mark.parametrize(
    "variable", ["AWS_SECRET_ACCESS_KEY", "HF_TOKEN", "OWN_KEY", "weft_key_box", "BOX_KEY_2", "WEFT_WAKE_TOKEN"]
)
def test_request_names_only_listed_variables_and_those_with_the_prefix(variable: str) -> None:
    with pytest.raises(FieldError, match=f"may not name the variable {variable}: list it in key_variables") as refused:
        _attach(variable)
    assert refused.value.reason is Reason.PERMISSION_DENIED
