"""The runtime openai_http: an OpenAI-compatible server that runs already, used and never started or ended."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated

from annotated_types import MaxLen

from runner_svc.runtimes.openai_http.parameters import PARAMETERS
from runner_svc.runtimes.runtime import ModelFault, Runtime
from runner_svc.runtimes.settings import SleepingModelSettings, UpstreamSettings
from weft.kernel.request import TEXT_OPERATIONS, Operation, OperationName
from weft.kernel.settings import PUBLIC, SECRET

if TYPE_CHECKING:
    from runner_svc.runtimes.model_engine import ModelContext, ModelEngine


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenAiHttpModel(UpstreamSettings, SleepingModelSettings):
    """A model of an OpenAI-compatible server that runs already."""

    url: Annotated[str, MaxLen(2048), PUBLIC, SECRET] = field(repr=False)
    """Base URL of the server, such as `http://127.0.0.1:11434/v1`."""
    remote: bool | None = None
    """Whether serving it sends bytes off the premises. It must be set where the address of the server is not one of a
    network of your own."""
    embeddings: bool | None = None
    """Whether it also gives embeddings. Default: yes."""
    operations: Annotated[tuple[OperationName, ...], MaxLen(len(Operation)), PUBLIC] = ()
    """What the server offers, such as `[chat, tokenize]`. Default: `[chat, completion, embedding]`."""
    cache_salt: bool = False
    """Whether the server knows `cache_salt`, as vLLM does. It is then sent with every request, so that tenants share no
    cached prefixes; without it weft cannot keep them apart there."""

    @property
    def location(self) -> str:
        """Whose server it is: its address is not shown."""
        return "a server that runs already"


def _find_fault(model: OpenAiHttpModel, environment: Mapping[str, str]) -> ModelFault | None:
    from runner_svc.runtimes.openai_http.backend import find_fault  # noqa: PLC0415 - for doctor and join alone

    return find_fault(model.upstream_model or model.name, model, environment)


def _build(model: OpenAiHttpModel, context: "ModelContext") -> "ModelEngine":
    # Imported here: only a process that serves models needs these.
    from yarl import URL  # noqa: PLC0415

    from runner_svc.openai_upstream.address import base_url, is_private_host  # noqa: PLC0415
    from runner_svc.runtimes.model_engine import ModelEngine, parameter_profile, served_operations  # noqa: PLC0415
    from runner_svc.runtimes.openai_http.backend import AttachedServer, AttachedServerConfig  # noqa: PLC0415

    default = TEXT_OPERATIONS - {Operation.EMBEDDING} if model.embeddings is False else TEXT_OPERATIONS
    operations = served_operations(model, default, context)
    server = AttachedServerConfig(
        url=base_url(model.url, f"{context.where}.url"),
        upstream_model=model.upstream_model or model.name,
        api_key_env=model.api_key_env,
        operations=operations,
        context_tokens=model.context_tokens or 0,
        cache_salt=model.cache_salt,
        probe_interval_seconds=context.probe_interval_seconds,
        probe_failures=context.probe_failures,
        load_stall_seconds=context.load_stall_seconds,
        timeouts=context.timeouts,
        parameters=parameter_profile(model, PARAMETERS),
    )
    if model.remote is None and not is_private_host(URL(server.url).host or ""):
        raise context.refuse(
            "remote",
            "must be set, because the server's address is not one of a network of your own: true where it is off the "
            "premises (only requests with allow_remote are sent there then), else false",
        )
    return ModelEngine(
        make_backend=lambda: AttachedServer(server),
        operations=operations,
        slots=model.slots,
        context_tokens=server.context_tokens,
        remote=bool(model.remote),
        timeouts=server.timeouts,
    )


RUNTIME = Runtime(
    name="openai_http",
    summary="an OpenAI-compatible server that runs already",
    docs="docs/runners.md",
    settings=OpenAiHttpModel,
    build=_build,
    parameters=PARAMETERS,
    starts_engines=False,
    find_fault=_find_fault,
    no_output="weft did not start this server; its output is where it was started",
    advice={
        "chat_template_path": "this server renders its own; set the template there",
        "start_asleep": "weft did not start this server; give it a wake recipe instead",
        "replicas": "weft did not start this server and cannot start another",
        "replica_max": "weft did not start this server and cannot start another",
        "path": "a model file is served by a runner with `runtime: llama_server`",
    },
)
