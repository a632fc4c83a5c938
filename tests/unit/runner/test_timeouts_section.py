"""The limits of a configuration section reach the backends."""

from typing import Any

import pytest

from runner_svc.settings import RunnerSettings
from weft_app.config.loader import parse_section
from weft_app.config.runners import ConfiguredRunner

LIMITS = {
    "connect_timeout_seconds": 1.0,
    "headers_timeout_seconds": 2.0,
    "first_token_timeout_seconds": 3.0,
    "prefill_liveness_timeout_seconds": 4.0,
    "idle_stream_timeout_seconds": 5.0,
    "absolute_timeout_seconds": 6.0,
}


def _section(**fields: Any) -> RunnerSettings:
    model = {"name": "m", "path": "m.gguf"}
    return parse_section(ConfiguredRunner, {"name": "r", "models": [model]} | fields)


@pytest.mark.parametrize(("name", "seconds"), LIMITS.items())
def test_every_section_limit_is_a_profile_limit(name: str, seconds: float) -> None:
    profile = _section(**LIMITS).timeouts
    assert getattr(profile, name.replace("_timeout", "")) == seconds
