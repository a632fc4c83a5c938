"""The runtime openai_remote: models of a remote provider (docs/models.md)."""

from dataclasses import dataclass, field
from typing import Annotated, Literal

from annotated_types import Ge, Gt, Le, MaxLen

from runner_svc.policy.parameters import EngineParameters, OneOf
from runner_svc.runtimes.runtime import Runtime, deferred
from runner_svc.runtimes.runtime_settings import UpstreamSettings
from weft.kernel.requests.request_values import Operation, OperationName
from weft.kernel.settings.setting_annotations import PUBLIC, SECRET, UrlText

PARAMETERS = EngineParameters(
    engine="a remote provider",
    # OpenAI's parameters, for providers that follow its API and reject unknown ones.
    allowed={
        "verbosity": OneOf(("low", "medium", "high")),
    },
    untaken=frozenset({"min_p", "repeat_penalty", "top_k"}),
    is_strict=True,
)

MESSAGES_PARAMETERS = EngineParameters(engine="a provider with Anthropic's API", is_strict=True)
"""`runner_svc.anthropic_upstream.anthropic_request` decides which parameters are sent."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenAiRemoteModel(UpstreamSettings):
    """A model of a remote provider."""

    url: Annotated[UrlText, PUBLIC, SECRET] = field(repr=False)
    """Base URL of the provider: https and with the API version, such as `https://api.example.com/v1`."""
    remote: bool | None = None
    """Always true for this runtime: `true`, or left out."""
    embeddings: bool | None = None
    """Whether the model also serves embeddings. Default: false."""
    operations: Annotated[tuple[OperationName, ...], MaxLen(len(Operation)), PUBLIC] = ()
    """Operations that the provider supports, such as `[chat, embedding]`. Default: `[chat]`."""
    api_kind: Literal["chat_completions", "messages"] = "chat_completions"
    """API of the provider: OpenAI's Chat Completions or Anthropic's Messages."""
    timeout_seconds: Annotated[float, Gt(0), Le(3600), PUBLIC] = 120.0
    """Longest wait until an answer begins, including retries and the pauses before them."""
    max_retries: Annotated[int, Ge(0), Le(10), PUBLIC] = 0
    """Number of retries by the runner if the provider is busy (429, 503) or cannot be reached. In addition, the router
    may retry on another runner."""
    health_check: Literal["config_only", "models"] = "config_only"
    """`config_only`: the provider is called only for requests. `models`: its list of models is also requested, at
    startup and every minute."""
    token_limit_name: Literal["max_tokens", "max_completion_tokens"] = "max_tokens"  # noqa: S105 - a parameter's name
    """Name of the field for the maximum number of answer tokens in the provider's API."""

    @property
    def location(self) -> str:
        """A label that hides the address."""
        return "a provider's"


PROBE_INTERVAL_SECONDS = 60.0
PROBE_FAILURES = 3


RUNTIME = Runtime(
    name="openai_remote",
    summary="a remote provider",
    docs="docs/models.md",
    settings=OpenAiRemoteModel,
    build=deferred("runner_svc.runtimes.openai_remote.openai_remote_backend:build"),
    parameters=PARAMETERS,
    starts_engines=False,
    no_output="this is a provider's model, whose output stays with the provider",
    advice={"path": "a model file is served by a runner with `runtime: llama_server`"},
)
