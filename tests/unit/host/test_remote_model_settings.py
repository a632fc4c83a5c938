"""From a section about a provider's model to the backend that serves it."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from runner_svc.instance.instance_settings import ServedModel
from runner_svc.policy.parameters import ParameterProfile
from runner_svc.runner_settings import RunnerSettings
from runner_svc.runtimes.openai_remote.openai_remote_backend import OpenAiRemote
from runner_svc.runtimes.openai_remote.runtime import PARAMETERS as OPENAI_REMOTE_PARAMETERS
from runner_svc.runtimes.openai_remote.runtime import OpenAiRemoteModel
from weft.kernel.errors.error_tree import FieldError
from weft.kernel.requests.request_values import Operation
from weft_app.compose.home import WeftHome
from weft_app.compose.join import config_with_server
from weft_app.compose.runner import runner_config
from weft_app.compose.served_models import runner_context, served_model
from weft_app.config.loader import load_config, parse_section
from weft_app.config.runners import ConfiguredRunner, with_replicas

URL = "https://api.example.com/v1"
KEYS = {"EXAMPLE_API_KEY": "sk-secret-words"}
PAGE = Path(__file__).resolve().parents[3] / "docs" / "models.md"


def _section(**fields: Any) -> RunnerSettings:
    model = {"name": "m", "url": URL, "api_key_env": "EXAMPLE_API_KEY", **fields}
    return parse_section(ConfiguredRunner, {"name": "cloud", "runtime": "openai_remote", "models": [model]})


def _served(environment: dict[str, str] | None = None, **fields: Any) -> ServedModel:
    section = _section(**fields)
    parts = replace(runner_context(section), environment=KEYS if environment is None else environment)
    return served_model(section, section.models[0], 5.0, parts)


def _backend(**fields: Any) -> OpenAiRemote:
    backend = _served(**fields).make_backend()
    assert isinstance(backend, OpenAiRemote)
    return backend


def test_model_with_only_a_url_and_key_has_the_documented_defaults() -> None:
    backend = _backend()
    model, timeouts = backend.model, backend.context.timeouts
    assert (model.timeout_seconds, model.max_retries, model.health_check) == (120.0, 0, "config_only")
    assert (model.server_model, _served().context_tokens) == ("m", 0)
    assert backend.operations == {Operation.CHAT}
    assert backend.parameters == ParameterProfile(engine=OPENAI_REMOTE_PARAMETERS)
    assert (timeouts.headers_seconds, timeouts.first_token_seconds) == (None, 240.0)


def test_platform_prompt_of_a_non_chat_model_is_refused_with_its_field() -> None:
    with pytest.raises(FieldError, match="is only for chat models") as raised:
        _served(operations=["embedding"], platform_prompt=True)
    assert raised.value.field == "runners.cloud.models.m.platform_prompt"
    assert _served(platform_prompt=True).chat.platform_prompt


def test_configured_provider_options_reach_the_backend() -> None:
    backend = _backend(
        upstream_model="frontier",
        timeout_seconds=7.0,
        max_retries=3,
        health_check="models",
        thinking=False,
        token_limit_name="max_completion_tokens",
        embeddings=True,
        context_tokens=32_000,
    )
    model = backend.model
    assert (model.server_model, model.timeout_seconds, model.max_retries) == ("frontier", 7.0, 3)
    assert (model.health_check, model.context_tokens) == ("models", 32_000)
    assert backend.operations == {Operation.CHAT, Operation.EMBEDDING}
    assert (backend.parameters.thinking, backend.parameters.token_limit_name) == (False, "max_completion_tokens")


def test_provider_model_is_remote_and_its_failures_are_per_request() -> None:
    served = _served()
    assert served.remote
    assert served.hibernation.attached
    assert served.requests_fail_alone
    assert not served.hibernation.can_unload
    assert _served(remote=True).remote


@pytest.mark.parametrize(
    ("fields", "field", "says"),
    [
        ({"remote": False}, "remote", "must be true"),
        ({"url": "http://api.example.com/v1"}, "url", "must be https"),
        ({"url": "http://10.0.0.7/v1"}, "url", "must be https"),
        ({"url": "https://user:word@api.example.com/v1"}, "url", "must not contain credentials"),
        ({"url": "https://api.example.com/v1?key=1"}, "url", "without a query"),
        ({"url": "ftp://api.example.com"}, "url", "must be an http or https URL"),
    ],
)
def test_invalid_provider_setting_error_names_it_without_the_address(
    fields: dict[str, Any], field: str, says: str
) -> None:
    with pytest.raises(FieldError) as refused:
        _served(**fields)
    assert refused.value.field == f"runners.cloud.models.m.{field}"
    assert says in refused.value.message
    assert "example.com" not in refused.value.message


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "[::1]", "127.8.8.8"])
def test_http_is_allowed_for_loopback_only(host: str) -> None:
    assert _backend(url=f"http://{host}:8080/v1").base_url == f"http://{host}:8080/v1"


def test_non_string_key_is_refused_and_not_shown() -> None:
    lack = _served(environment={"EXAMPLE_API_KEY": "bad\nkey"}).lack
    assert lack is not None
    assert "EXAMPLE_API_KEY" in lack.message
    assert "bad" not in lack.message


def test_unset_key_fails_only_the_loads_of_its_model() -> None:
    """It ended the runner, with the models of all other providers."""
    lack = _served(api_key_env="OTHER_KEY").lack
    assert lack is not None
    assert "m.api_key_env: the environment variable OTHER_KEY should contain the key" in lack.message


@pytest.mark.parametrize(
    "fields",
    [
        {"path": "/m.gguf"},
        {"cache_salt": True},
        {"start_asleep": True},
        {"chat_template_path": "/t.jinja"},
        {"replicas": 2},
        {"wake": {"type": "command", "argv": ["true"]}},
        {"sleep": {"after_seconds": 1.0, "type": "command", "argv": ["true"]}},
        {"max_retries": 11},
        {"api_kind": "responses"},
        {"timeout_seconds": 0.0},
    ],
)
def test_setting_unsupported_by_providers_is_refused(fields: dict[str, Any]) -> None:
    with pytest.raises(FieldError) as refused:
        _section(**fields)
    assert next(iter(fields)) in str(refused.value)


@pytest.mark.parametrize("name", ["api_kind", "timeout_seconds", "max_retries", "health_check", "token_limit_name"])
def test_provider_only_setting_is_refused_for_other_models(name: str) -> None:
    value = {"api_kind": "chat_completions", "health_check": "models", "token_limit_name": "max_tokens"}.get(name, 1)
    model = {"name": "m", "path": "/m.gguf", name: value}
    with pytest.raises(FieldError, match=f"cannot have {name}"):
        parse_section(ConfiguredRunner, {"name": "r", "models": [model]})


def test_context_of_an_attached_server_is_unknown_unless_configured() -> None:
    """A default of 2048 would let the router refuse prompts that the server takes."""
    for said, told in (({}, 0), ({"context_tokens": 4096}, 4096)):
        model = {"name": "m", "url": "http://127.0.0.1:1", **said}
        section = parse_section(ConfiguredRunner, {"name": "r", "runtime": "openai_http", "models": [model]})
        assert served_model(section, section.models[0], 5.0).context_tokens == told


def _attached(url: str, **fields: Any) -> ServedModel:
    model = {"name": "m", "url": url, **fields}
    section = parse_section(ConfiguredRunner, {"name": "r", "runtime": "openai_http", "models": [model]})
    return served_model(section, section.models[0], 5.0)


@pytest.mark.parametrize(
    "host",
    [
        "api.example.com",
        "8.8.8.8",
        "[2606:4700::1111]",
        "[::ffff:8.8.8.8]",
        "lan.example.org",
        "evil-local.io",
        "134744072",
        "0x08080808",
    ],
)
def test_public_server_needs_an_explicit_remote_setting(host: str) -> None:
    """Otherwise a provider that is attached as a plain server would be sent requests that may not leave."""
    with pytest.raises(FieldError) as refused:
        _attached(f"https://{host}/v1")
    assert refused.value.field == "runners.r.models.m.remote"
    assert host.strip("[]") not in refused.value.message
    assert _attached(f"https://{host}/v1", remote=True).remote
    assert not _attached(f"https://{host}/v1", remote=False).remote


@pytest.mark.parametrize(
    "host", ["127.0.0.1", "localhost", "10.0.0.7", "192.168.1.5", "[fd00::7]", "100.64.0.9", "gpu-box", "gpu-box.lan"]
)
def test_private_network_server_needs_no_remote_setting(host: str) -> None:
    assert not _attached(f"http://{host}:8000/v1").remote


@pytest.mark.parametrize("said", [True, False])
def test_command_line_server_declares_if_it_is_remote(said: bool) -> None:
    config = config_with_server(None, runner="r", url="https://api.example.com/v1", model="m", remote=said)
    (runner,) = config.runners or ()
    assert served_model(runner, runner.models[0], 5.0).remote is said


def test_key_is_absent_from_every_representation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EXAMPLE_API_KEY", KEYS["EXAMPLE_API_KEY"])
    section = _section()
    config = runner_config(section, WeftHome(tmp_path), address="unix:/r", registry_address="unix:/g")
    backend = _backend()
    shown = (section, config, backend.model, backend.context, with_replicas(section, section.models))
    for text in map(repr, shown):
        assert "sk-secret-words" not in text
        assert "example.com" not in text


def test_every_documented_configuration_is_valid(tmp_path: Path) -> None:
    blocks = [part.partition("```")[0] for part in PAGE.read_text(encoding="utf-8").split("```yaml\n")[1:]]
    configurations = [block for block in blocks if "runners" in yaml.safe_load(block)]
    assert configurations
    for block in configurations:
        path = tmp_path / "weft.yaml"
        path.write_text(block, encoding="utf-8")
        for runner in load_config(path).runners or ():
            for model in runner.models:
                if isinstance(model, OpenAiRemoteModel):
                    keys = {} if model.api_key_env is None else {model.api_key_env: "sk-any"}
                    assert served_model(runner, model, 5.0, replace(runner_context(runner), environment=keys)).remote
