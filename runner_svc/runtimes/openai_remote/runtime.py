"""The runtime openai_remote: models of a provider off the premises (docs/remote.md)."""

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Literal

from annotated_types import Ge, Gt, Le, MaxLen

from runner_svc.runtimes.openai_remote.parameters import PARAMETERS
from runner_svc.runtimes.runtime import Runtime
from runner_svc.runtimes.settings import ModelSettings, UpstreamSettings
from weft.kernel.request import Operation, OperationName
from weft.kernel.settings import PUBLIC, SECRET

if TYPE_CHECKING:
    from runner_svc.runtimes.model_engine import ModelContext, ModelEngine


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenAiRemoteModel(UpstreamSettings, ModelSettings):
    """A model of a provider off the premises."""

    url: Annotated[str, MaxLen(2048), PUBLIC, SECRET] = field(repr=False)
    """Base URL of the provider, https and with its version, such as `https://api.example.com/v1`."""
    remote: bool | None = None
    """Whether serving it sends bytes off the premises. Always so: true or left out."""
    embeddings: bool | None = None
    """Whether it also gives embeddings. Default: no."""
    operations: Annotated[tuple[OperationName, ...], MaxLen(len(Operation)), PUBLIC] = ()
    """What the provider offers, such as `[chat, embedding]`. Default: `[chat]`."""
    api_kind: Literal["chat_completions"] = "chat_completions"
    """Which of the provider's interfaces is used."""
    timeout_seconds: Annotated[float, Gt(0), Le(3600), PUBLIC] = 120.0
    """Longest wait until an answer begins, repetitions and the pauses before them included."""
    max_retries: Annotated[int, Ge(0), Le(10), PUBLIC] = 0
    """How often the runner itself repeats a request for which the provider was too busy (429, 503) or to which it could
    not connect. The router may try elsewhere besides."""
    health_check: Literal["config_only", "models"] = "config_only"
    """`config_only` calls the provider for requests alone; `models` also requests its list of models, at the start and
    every minute."""
    token_limit_name: Literal["max_tokens", "max_completion_tokens"] = "max_tokens"  # noqa: S105 - a parameter's name
    """What the provider calls the limit of an answer's length."""

    @property
    def location(self) -> str:
        """Whose model it is: the address is not shown."""
        return "a provider's"


def _provider_url(model: OpenAiRemoteModel, context: "ModelContext") -> str:
    from yarl import URL  # noqa: PLC0415 - see _build

    from runner_svc.openai_upstream.address import base_url, is_loopback  # noqa: PLC0415

    url = URL(base_url(model.url, f"{context.where}.url"))
    if url.scheme != "https" and not is_loopback(url.host or ""):
        raise context.refuse("url", "must be https: the key and every prompt are sent there")
    return str(url)


def _build(model: OpenAiRemoteModel, context: "ModelContext") -> "ModelEngine":
    # Imported here: only a process that serves models needs these.
    from dataclasses import replace  # noqa: PLC0415

    from runner_svc.openai_upstream.unmanaged_server import read_key  # noqa: PLC0415
    from runner_svc.runtimes.model_engine import ModelEngine, parameter_profile, served_operations  # noqa: PLC0415
    from runner_svc.runtimes.openai_remote.backend import OpenAiRemote, OpenAiRemoteConfig  # noqa: PLC0415
    from weft.kernel.errors import WeftError  # noqa: PLC0415

    default = frozenset({Operation.CHAT, Operation.EMBEDDING} if model.embeddings else {Operation.CHAT})
    operations = served_operations(model, default, context)
    if model.remote is False:
        raise context.refuse("remote", "must be true or left out: serving it sends bytes off the premises")
    try:
        read_key(model.api_key_env, context.environment)
    except WeftError as error:
        raise context.refuse("api_key_env", error.message) from None
    # Until an answer begins the backend itself measures; then its first token may take as long again: a provider's
    # prefill cannot be observed, so the wait for it is limited.
    timeouts = replace(
        context.timeouts,
        headers_seconds=None,
        first_token_seconds=context.timeouts.first_token_seconds or 2 * model.timeout_seconds,
    )
    config = OpenAiRemoteConfig(
        url=_provider_url(model, context),
        upstream_model=model.upstream_model or model.name,
        api_key_env=model.api_key_env,
        environment=context.environment,
        operations=operations,
        context_tokens=model.context_tokens or 0,
        timeout_seconds=model.timeout_seconds,
        max_retries=model.max_retries,
        health_check=model.health_check,
        timeouts=timeouts,
        parameters=replace(parameter_profile(model, PARAMETERS), token_limit_name=model.token_limit_name),
    )
    return ModelEngine(
        make_backend=lambda: OpenAiRemote(config),
        operations=operations,
        slots=model.slots,
        context_tokens=config.context_tokens,
        remote=True,
        timeouts=timeouts,
        requests_fail_alone=True,
    )


RUNTIME = Runtime(
    name="openai_remote",
    summary="a provider off the premises",
    docs="docs/remote.md",
    settings=OpenAiRemoteModel,
    build=_build,
    parameters=PARAMETERS,
    starts_engines=False,
    no_output="this is a provider's model, whose output stays with the provider",
    advice={"path": "a model file is served by a runner with `runtime: llama_server`"},
)
