"""The runtime openai_http: an OpenAI-compatible server that runs already, used and never started or ended."""

from collections.abc import Mapping
from typing import TYPE_CHECKING

from runner_svc.runtimes.openai_http.parameters import PARAMETERS
from runner_svc.runtimes.openai_http.settings import ATTACHED_SLOTS, OpenAiHttpModel
from runner_svc.runtimes.runtime import ModelFault, Runtime

if TYPE_CHECKING:
    from runner_svc.runtimes.model_engine import ModelContext, ModelEngine


def _find_fault(model: OpenAiHttpModel, environment: Mapping[str, str]) -> ModelFault | None:
    from runner_svc.runtimes.openai_http.backend import find_fault  # noqa: PLC0415 - for doctor and join alone

    return find_fault(model, environment)


def _build(model: OpenAiHttpModel, context: "ModelContext") -> "ModelEngine":
    # Imported here: only a process that serves models needs these.
    from runner_svc.openai_upstream.address import base_url, require_known_place  # noqa: PLC0415
    from runner_svc.runtimes.model_engine import ModelEngine  # noqa: PLC0415
    from runner_svc.runtimes.openai_http.backend import AttachedServer, operations_of  # noqa: PLC0415

    operations = operations_of(model, context)
    url = base_url(model.url, f"{context.where}.url")
    require_known_place(url, remote=model.remote, field=f"{context.where}.remote")
    return ModelEngine(
        make_backend=lambda: AttachedServer(model, context),
        operations=operations,
        slots=model.slots or ATTACHED_SLOTS,
        context_tokens=model.context_tokens or 0,
        remote=bool(model.remote),
        timeouts=context.timeouts,
    )


RUNTIME = Runtime(
    name="openai_http",
    summary="an OpenAI-compatible server that runs already",
    docs="docs/engines.md",
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
