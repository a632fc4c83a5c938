"""The runtime vllm_serve: `vllm serve`, one process group per model, started and ended by weft."""

from typing import TYPE_CHECKING

from runner_svc.environments.vllm.environment import ENVIRONMENT
from runner_svc.policy.memory_estimate import EngineHabits
from runner_svc.runtimes.runtime import Runtime
from runner_svc.runtimes.vllm_serve.parameters import PARAMETERS
from runner_svc.runtimes.vllm_serve.settings import VllmServeModel
from weft.kernel.errors import invalid_field
from weft.kernel.request import Skill

if TYPE_CHECKING:
    from collections.abc import Mapping

    from runner_svc.policy.load_plan import LoadValue
    from runner_svc.runtimes.model_engine import ModelContext, ModelEngine

PROGRAM = "vllm"
UTILIZATION_VARIABLE = "VLLM_GPU_MEMORY_UTILIZATION"
CACHING_VARIABLE = "VLLM_ENABLE_PREFIX_CACHING"
_FLAGS = {"1": True, "true": True, "yes": True, "on": True, "0": False, "false": False, "no": False, "off": False}
_SKILLS = {"image": Skill.IMAGE, "audio": Skill.AUDIO}


def _load_values(model: VllmServeModel) -> "Mapping[str, LoadValue]":
    from runner_svc.runtimes.vllm_serve.arguments import configured_parameters  # noqa: PLC0415 - see Runtime

    return configured_parameters(model)


def _check(model: VllmServeModel, context: "ModelContext") -> None:
    """Raise INVALID_ARGUMENT naming a setting that contradicts another, or names a file that does not exist."""
    from runner_svc.runtimes.vllm_serve.arguments import OWN_FLAGS  # noqa: PLC0415

    for index, argument in enumerate(model.extra_arguments):
        if (why := OWN_FLAGS.get(argument.partition("=")[0])) is not None:
            raise context.refuse(f"extra_arguments[{index}]", f"cannot be {argument.partition('=')[0]}: {why}")
    template = model.chat_template_file
    if template is not None and not template.is_file():
        raise context.refuse("chat_template_path", f"there is no file {template}")
    if model.kind != "generation":
        for setting in ("lora_path", "tool_call_parser", "reasoning_parser", "speculative_method", "speculative_model"):
            if getattr(model, setting) is not None:
                raise context.refuse(setting, f"is for models of kind generation, not {model.kind}")
    if model.speculative_model is not None and model.speculative_method is None:
        raise context.refuse("speculative_method", "must be set with speculative_model: draft_model, mtp or eagle3")
    if model.max_pixels is not None and "max_pixels" in model.mm_processor_kwargs:
        raise context.refuse("max_pixels", "is also in mm_processor_kwargs; leave one of them out")


def _with_environment(model: VllmServeModel, context: "ModelContext") -> VllmServeModel:
    """Returns the settings with those that they leave to variables of the runner API.

    Raises INVALID_ARGUMENT naming a variable with an invalid value.
    """
    from dataclasses import replace  # noqa: PLC0415 - see _build

    utilization = context.environment.get(UTILIZATION_VARIABLE, "").strip()
    if utilization and model.gpu_memory_utilization is None:
        share = _number(utilization)
        if share is None or not 0 < share <= 1:
            raise invalid_field(UTILIZATION_VARIABLE, "must be a number above 0 and at most 1")
        model = replace(model, gpu_memory_utilization=share)
    caching = context.environment.get(CACHING_VARIABLE, "").strip().lower()
    if caching and model.prefix_caching is None:
        if caching not in _FLAGS:
            raise invalid_field(CACHING_VARIABLE, "must be true or false")
        model = replace(model, prefix_caching=_FLAGS[caching])
    return model


def _number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None


def _build(model: VllmServeModel, context: "ModelContext") -> "ModelEngine":
    # Imported here: only a process that serves models needs these.
    from dataclasses import replace  # noqa: PLC0415
    from pathlib import Path  # noqa: PLC0415

    from runner_svc.memory.estimate import (  # noqa: PLC0415
        ForecastModel,
        ModelFacts,
        ModelFiles,
        manifest_bytes_of,
        read_model_facts,
    )
    from runner_svc.runtimes.model_engine import ModelEngine  # noqa: PLC0415
    from runner_svc.runtimes.vllm_serve.arguments import operations_of  # noqa: PLC0415
    from runner_svc.runtimes.vllm_serve.backend import VllmServeBackend  # noqa: PLC0415
    from runner_svc.runtimes.vllm_serve.forecast import VllmForecast  # noqa: PLC0415
    from weft.kernel.abilities import Abilities  # noqa: PLC0415

    _check(model, context)
    model = _with_environment(model, context)
    if not context.command:
        context = replace(context, command=(str(context.environments.environment_program(ENVIRONMENT, PROGRAM)),))
    facts = ModelFacts() if model.folder is None else read_model_facts(model.folder)
    context = replace(context, trained_context_tokens=facts.context_tokens)
    draft = None if model.speculative_model is None else Path(model.speculative_model).expanduser()
    forecast = ForecastModel(
        name=model.model,
        files=ModelFiles(path=model.folder or Path(model.model), draft=draft if draft and draft.is_dir() else None),
        context_tokens=model.slot_context_tokens,
        slots=model.slots,
        parameters=_load_values(model),
        habits=RUNTIME.habits,
        manifest_bytes=manifest_bytes_of(model.memory_mb),
    )
    # What the settings leave open depends on the model, and is tried.
    limits = {_SKILLS[kind]: count for kind, count in model.limit_mm_per_prompt.items() if kind in _SKILLS}
    extra = {skill for skill, count in limits.items() if count}
    tools = {Skill.TOOLS} if model.tool_call_parser is not None else set()
    abilities = Abilities(skills=frozenset({Skill.TEXT, *extra, *tools}), lacking=frozenset(limits.keys() - extra))
    return ModelEngine(
        make_backend=lambda: VllmServeBackend(model, context, shape=facts.shape),
        operations=operations_of(model),
        slots=model.slots,
        context_tokens=model.slot_context_tokens,
        forecast=VllmForecast(forecast, context.estimator, model, facts.shape),
        remote=bool(model.remote),
        timeouts=context.timeouts,
        abilities=abilities,
    )


RUNTIME = Runtime(
    name="vllm_serve",
    summary="vLLM's server, which weft starts",
    docs="docs/runners.md",
    settings=VllmServeModel,
    build=_build,
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
