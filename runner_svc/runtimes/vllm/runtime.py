"""The runtime vllm: `vllm serve`, one process group per model, started and ended by weft."""

from typing import TYPE_CHECKING

from runner_svc.environments.vllm.environment import ENVIRONMENT
from runner_svc.policy.engine_choice import WeightFormat
from runner_svc.policy.memory_estimate import EngineHabits
from runner_svc.policy.model_sizing import EnginePlaces
from runner_svc.runtimes.runtime import Runtime
from runner_svc.runtimes.vllm.parameters import PARAMETERS
from runner_svc.runtimes.vllm.settings import VllmModel
from weft.kernel.request import Skill

if TYPE_CHECKING:
    from collections.abc import Mapping

    from runner_svc.runtimes.model_engine import ModelContext, ModelEngine
    from weft.kernel.load_parameters import LoadValue

PROGRAM = "vllm"
_SKILLS = {"image": Skill.IMAGE, "audio": Skill.AUDIO}


def _load_values(model: VllmModel) -> "Mapping[str, LoadValue]":
    from runner_svc.runtimes.vllm.arguments import configured_parameters  # noqa: PLC0415 - see Runtime

    return configured_parameters(model)


def _build(model: VllmModel, context: "ModelContext") -> "ModelEngine":
    # Imported here: only a process that serves models needs these.
    from dataclasses import replace  # noqa: PLC0415

    from runner_svc.memory.estimate import ModelFacts, read_model_facts  # noqa: PLC0415
    from runner_svc.runtimes.vllm.adapters import check_adapters  # noqa: PLC0415
    from runner_svc.runtimes.vllm.backend import VllmBackend  # noqa: PLC0415
    from runner_svc.runtimes.vllm.model import check_model, model_engine, with_environment  # noqa: PLC0415
    from weft.kernel.abilities import Abilities  # noqa: PLC0415

    check_model(model, context)
    check_adapters(model, context)
    model = with_environment(model, context)
    if not context.command:
        context = replace(context, command=(str(context.environments.environment_program(ENVIRONMENT, PROGRAM)),))
    facts = ModelFacts() if model.folder is None else read_model_facts(model.folder)
    context = replace(context, trained_context_tokens=facts.context_tokens)
    # What the settings leave open depends on the model, and is tried.
    limits = {_SKILLS[kind]: count for kind, count in model.limit_mm_per_prompt.items() if kind in _SKILLS}
    extra = {skill for skill, count in limits.items() if count}
    tools = {Skill.TOOLS} if model.tool_call_parser is not None else set()
    return model_engine(
        model,
        context,
        facts,
        lambda: VllmBackend(model, context, shape=facts.shape),
        habits=RUNTIME.habits,
        abilities=Abilities(skills=frozenset({Skill.TEXT, *extra, *tools}), lacking=frozenset(limits.keys() - extra)),
    )


RUNTIME = Runtime(
    name="vllm",
    other_names=("vllm_serve",),
    summary="vLLM's server, which weft starts",
    docs="docs/engines.md",
    settings=VllmModel,
    build=_build,
    formats=frozenset({WeightFormat.SAFETENSORS}),
    places=EnginePlaces(in_layers=False),
    parameters=PARAMETERS,
    habits=EngineHabits(),
    load_values=_load_values,
    environment=ENVIRONMENT,
    variable_prefix="VLLM_",
    advice={
        "path": "a folder or an id of the hub is `model`",
        "url": "a vLLM that runs already is a model of a runner with `runtime: openai_http`",
        "operations": "`kind` says what vLLM is started for",
        "embeddings": "`kind: embedding`",
        "cache_salt": "it is always sent",
    },
)
