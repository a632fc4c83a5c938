"""The runtime vllm: the library in a child process of its own, one per model (docs/decisions/0011)."""

from typing import TYPE_CHECKING

from runner_svc.environments.vllm.environment import ENVIRONMENT
from runner_svc.policy.engine_choice import WeightFormat
from runner_svc.policy.memory_estimate import EngineHabits
from runner_svc.policy.model_sizing import EnginePlaces
from runner_svc.runtimes.runtime import Runtime
from runner_svc.runtimes.vllm.parameters import PARAMETERS
from runner_svc.runtimes.vllm.settings import VllmLibraryModel

if TYPE_CHECKING:
    from collections.abc import Mapping

    from runner_svc.policy.load_plan import LoadValue
    from runner_svc.runtimes.model_engine import ModelContext, ModelEngine


def _load_values(model: VllmLibraryModel) -> "Mapping[str, LoadValue]":
    from runner_svc.runtimes.vllm_engine.arguments import configured_parameters  # noqa: PLC0415 - see Runtime

    return configured_parameters(model)


def _build(model: VllmLibraryModel, context: "ModelContext") -> "ModelEngine":
    # Imported here: only a process that serves models needs these.
    from dataclasses import replace  # noqa: PLC0415

    from runner_svc.memory.estimate import ModelFacts, read_model_facts  # noqa: PLC0415
    from runner_svc.runtimes.model_engine import known_templates, text_abilities  # noqa: PLC0415
    from runner_svc.runtimes.vllm.arguments import OWN_FLAGS  # noqa: PLC0415
    from runner_svc.runtimes.vllm.backend import VllmBackend  # noqa: PLC0415
    from runner_svc.runtimes.vllm_engine.adapters import check_adapters  # noqa: PLC0415
    from runner_svc.runtimes.vllm_engine.model import check_model, model_engine, with_environment  # noqa: PLC0415

    check_model(model, context, OWN_FLAGS)
    check_adapters(model, context)
    for setting, value in (
        ("limit_mm_per_prompt", any(model.limit_mm_per_prompt.values())),
        ("mm_processor_kwargs", model.mm_processor_kwargs),
        ("max_pixels", model.max_pixels),
    ):
        if value:
            raise context.refuse(setting, "is for models that take images; they need the runtime vllm_serve")
    model = with_environment(model, context)
    facts = ModelFacts() if model.folder is None else read_model_facts(model.folder)
    templates = known_templates(model, facts)
    context = replace(context, trained_context_tokens=facts.context_tokens, templates=templates)
    return model_engine(
        model,
        context,
        facts,
        lambda: VllmBackend(model, context, shape=facts.shape),
        habits=RUNTIME.habits,
        abilities=text_abilities(templates),
    )


RUNTIME = Runtime(
    name="vllm",
    summary="vLLM in a process that weft starts",
    docs="docs/runtimes.md",
    settings=VllmLibraryModel,
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
        "tool_call_parser": "weft reads calls from the text; vLLM's parsers are in its server, `vllm_serve`",
        "reasoning_parser": "vLLM's parsers are in its server, `vllm_serve`",
    },
)
