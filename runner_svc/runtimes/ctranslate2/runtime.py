"""The runtime ctranslate2: the library in a child process of its own, one per model (docs/decisions/0011)."""

from dataclasses import replace
from typing import TYPE_CHECKING

from runner_svc.environments.ctranslate2.environment import ENVIRONMENT
from runner_svc.policy.engine_choice import WeightFormat
from runner_svc.policy.model_sizing import EnginePlaces
from runner_svc.runtimes.ctranslate2.parameters import PARAMETERS
from runner_svc.runtimes.ctranslate2.settings import CTranslate2Model
from runner_svc.runtimes.runtime import Runtime

if TYPE_CHECKING:
    from collections.abc import Mapping

    from runner_svc.runtimes.model_engine import ModelContext, ModelEngine
    from weft.kernel.load_parameters import LoadValue


def _load_values(model: CTranslate2Model) -> "Mapping[str, LoadValue]":
    # On a processor no layer is on a device.
    return {"gpu_layers": 0} if model.device == "cpu" else {}


def _build(model: CTranslate2Model, context: "ModelContext") -> "ModelEngine":
    # Imported here: only a process that serves models needs these.
    from runner_svc.runtimes.ctranslate2.backend import CTranslate2Backend  # noqa: PLC0415
    from runner_svc.runtimes.model_engine import file_context, file_engine, text_abilities  # noqa: PLC0415

    if model.embeddings:
        raise context.refuse("embeddings", "must be false: CTranslate2 gives no embeddings of generating models")
    if model.unload_keeps_process and not model.sleeps_in_place:
        raise context.refuse("unload_keeps_process", "needs sleeps_in_place: its process is ended otherwise")
    context = file_context(model, context, context.command)
    engine = file_engine(
        model,
        context,
        lambda: CTranslate2Backend(model, context),
        operations=CTranslate2Backend.always,
        habits=RUNTIME.habits,
        load_values=_load_values(model),
        abilities=text_abilities(context.templates),
    )
    return replace(engine, unload_keeps_process=model.unload_keeps_process)


RUNTIME = Runtime(
    name="ctranslate2",
    summary="CTranslate2 in a process that weft starts",
    docs="docs/engines.md",
    settings=CTranslate2Model,
    build=_build,
    formats=frozenset({WeightFormat.CTRANSLATE2}),
    places=EnginePlaces(in_layers=False),
    parameters=PARAMETERS,
    load_values=_load_values,
    environment=ENVIRONMENT,
    advice={"operations": "the library's operations are fixed"},
)
