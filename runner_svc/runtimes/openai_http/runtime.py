"""The runtime openai_http: an external OpenAI-compatible server, which weft does not start or stop."""

from dataclasses import dataclass, field
from typing import Annotated

from annotated_types import Ge, Le, MaxLen

from runner_svc.policy.parameters import (
    MAX_INT,
    MAX_TEMPLATE_ARGUMENT_CHARS,
    MIROSTAT,
    TEMPLATE_ARGUMENTS,
    Document,
    EngineParameters,
    Flag,
    Number,
    OneOf,
    TokenIds,
)
from runner_svc.runtimes.runtime import Runtime, deferred
from runner_svc.runtimes.runtime_settings import SleepingModelSettings, UpstreamSettings
from weft.kernel.requests.request_values import Operation, OperationName
from weft.kernel.settings.setting_annotations import PUBLIC, SECRET, UrlText

PARAMETERS = EngineParameters(
    engine="an attached server",
    # Parameters that several servers support under the same name, and that are harmless on others.
    allowed={
        TEMPLATE_ARGUMENTS: Document(MAX_TEMPLATE_ARGUMENT_CHARS),
        "ignore_eos": Flag(),
        "min_tokens": Number(0, MAX_INT, whole=True),
        "mirostat": Number(0, 2, whole=True),
        **MIROSTAT,
        "repetition_penalty": Number(0, 2),
        "stop_token_ids": TokenIds(64),
        "typical_p": Number(0, 1),
        "verbosity": OneOf(("low", "medium", "high")),
    },
)


ATTACHED_SLOTS = 64
"""Number of concurrent requests if the server reports none: it has its own queue."""
MAX_ATTACHED_SLOTS = 4096
"""Maximum number of concurrent requests, even if the server reports more."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenAiHttpModel(UpstreamSettings, SleepingModelSettings):
    """A model of a running OpenAI-compatible server."""

    url: Annotated[UrlText, PUBLIC, SECRET] = field(repr=False)
    """Base URL of the server, such as `http://127.0.0.1:11434/v1`."""
    slots: Annotated[int, Ge(0), Le(MAX_ATTACHED_SLOTS), PUBLIC] = 0
    """Maximum number of concurrent requests, unless the server reports fewer. 0: as many as it reports, at most 4096;
    64 if it reports none."""
    remote: bool | None = None
    """Whether requests for the model are sent to a remote provider. Required if the server's address is outside your
    own networks."""
    embeddings: bool | None = None
    """Whether the model also serves embeddings. Default: true."""
    operations: Annotated[tuple[OperationName, ...], MaxLen(len(Operation)), PUBLIC] = ()
    """Operations that the server supports, such as `[chat, tokenize]`. Default: `[chat, completion, embedding]`."""
    cache_salt: bool = False
    """Whether the server supports `cache_salt`, as vLLM does. weft then sends it with every request, so that tenants
    share no cached prefixes. Without it, tenants share the server's prefix cache."""

    @property
    def location(self) -> str:
        """A label that hides the address."""
        return "a running server"


RUNTIME = Runtime(
    name="openai_http",
    summary="a running OpenAI-compatible server",
    docs="docs/engines.md",
    settings=OpenAiHttpModel,
    build=deferred("runner_svc.runtimes.openai_http.openai_http_backend:build"),
    parameters=PARAMETERS,
    starts_engines=False,
    find_fault=deferred("runner_svc.runtimes.openai_http.openai_http_backend:find_fault"),
    no_output="weft did not start this server; its output is where it was started",
    advice={
        "chat_template_path": "this server renders its own; set the template there",
        "start_asleep": "weft did not start this server; give it a wake recipe instead",
        "replicas": "weft did not start this server and cannot start another",
        "replica_max": "weft did not start this server and cannot start another",
        "path": "a model file is served by a runner with `runtime: llama_server`",
    },
)
