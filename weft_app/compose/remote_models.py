"""Models of providers off the premises, from their section to how a runner serves them."""

import ipaddress
from collections.abc import Mapping
from dataclasses import replace

from yarl import URL

from runner_svc.config import ServedModel
from runner_svc.instance.settings import HibernationSettings
from runner_svc.openai_upstream.unmanaged_server import read_key
from runner_svc.policy.parameters import ParameterProfile
from runner_svc.policy.timeouts import TimeoutProfile
from runner_svc.runtimes.openai_remote.backend import HealthCheck, OpenAiRemote, OpenAiRemoteConfig
from runner_svc.runtimes.openai_remote.parameters import PARAMETERS
from weft.kernel.errors import WeftError, invalid_field
from weft_app.compose.served_operations import provider_operations
from weft_app.compose.server_settings import base_url, engine_timeouts, said_context
from weft_app.config.runner_sections import ModelSection, RunnerSection


def remote_model(
    section: RunnerSection,
    model: ModelSection,
    where: str,
    hibernation: HibernationSettings,
    environment: Mapping[str, str],
) -> ServedModel:
    """One model of a provider; its key is in `environment`. Raises INVALID_ARGUMENT naming the field."""
    if "remote" in model.model_fields_set and not model.remote:
        raise invalid_field(f"{where}.remote", "must be true or left out: serving it sends bytes off the premises")
    require_key(model, where, environment)
    config = _provider_config(section, model, where, environment)
    return ServedModel(
        name=model.name,
        pool=model.pool or "",
        make_backend=lambda: OpenAiRemote(config),
        operations=config.operations,
        slots=model.slots,
        context_tokens=config.context_tokens,
        remote=True,
        timeouts=config.timeouts,
        hibernation=replace(hibernation, requests_fail_alone=True),
    )


def _provider_config(
    section: RunnerSection, model: ModelSection, where: str, environment: Mapping[str, str]
) -> OpenAiRemoteConfig:
    return OpenAiRemoteConfig(
        base_url=_provider_url(model.url, f"{where}.url"),
        upstream_model=model.upstream_model or model.name,
        api_key_env=model.api_key_env,
        environment=environment,
        operations=provider_operations(model),
        context_tokens=said_context(model),
        timeout_seconds=model.timeout_seconds,
        max_retries=model.max_retries,
        health_check=HealthCheck(model.health_check),
        timeouts=_timeouts(section, model),
        parameters=ParameterProfile(
            engine=PARAMETERS,
            passthrough=model.passthrough == "all",
            thinking=model.thinking,
            token_limit_name=model.token_limit_name,
        ),
    )


def require_key(model: ModelSection, where: str, environment: Mapping[str, str]) -> None:
    """Raises INVALID_ARGUMENT naming the variable that should hold the model's key and does not."""
    try:
        read_key(model.api_key_env, environment)
    except WeftError as error:
        raise invalid_field(f"{where}.api_key_env", error.message) from None


def _provider_url(text: str | None, field: str) -> str:
    url = URL(base_url(text, field))
    if url.scheme != "https" and not _is_loopback(url.host or ""):
        raise invalid_field(field, "must be https: the key and every prompt are sent there")
    return str(url)


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _timeouts(section: RunnerSection, model: ModelSection) -> TimeoutProfile:
    """As every server's; but nobody sees how a provider works on a prompt, so the wait for it has an end."""
    profile = engine_timeouts(section)
    # Until its answer begins, the backend itself measures; from then on its first piece may take as long again.
    return replace(
        profile, headers_seconds=None, first_token_seconds=profile.first_token_seconds or 2 * model.timeout_seconds
    )
