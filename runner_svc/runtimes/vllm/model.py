"""A model that vLLM loads: checks of its settings, those that the environment adds, and its engine."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from runner_svc.backend.port import Backend
from runner_svc.memory.estimate import ForecastModel, ModelFacts, ModelFiles, manifest_bytes_of
from runner_svc.policy.memory_estimate import EngineHabits
from runner_svc.runtimes.model_engine import ModelContext, ModelEngine
from runner_svc.runtimes.vllm.arguments import OWN_FLAGS, configured_parameters, operations_of
from runner_svc.runtimes.vllm.forecast import VllmForecast
from runner_svc.runtimes.vllm.settings import VllmModel
from weft.kernel.abilities import Abilities
from weft.kernel.errors import invalid_field

UTILIZATION_VARIABLE = "VLLM_GPU_MEMORY_UTILIZATION"
CACHING_VARIABLE = "VLLM_ENABLE_PREFIX_CACHING"
_FLAGS = {"1": True, "true": True, "yes": True, "on": True, "0": False, "false": False, "no": False, "off": False}
_FOR_GENERATION = ("lora_path", "speculative_method", "speculative_model", "tool_call_parser", "reasoning_parser")


def check_model(model: VllmModel, context: ModelContext) -> None:
    """Raise INVALID_ARGUMENT naming a setting that contradicts another, or names a file that does not exist."""
    for index, argument in enumerate(model.extra_arguments):
        if (why := OWN_FLAGS.get(argument.partition("=")[0])) is not None:
            raise context.refuse(f"extra_arguments[{index}]", f"cannot be {argument.partition('=')[0]}: {why}")
    template = model.chat_template_file
    if template is not None and not template.is_file():
        raise context.refuse("chat_template_path", f"there is no file {template}")
    if model.kind != "generation":
        for setting in _FOR_GENERATION:
            if getattr(model, setting) is not None:
                raise context.refuse(setting, f"is for models of kind generation, not {model.kind}")
    if model.speculative_model is not None and model.speculative_method is None:
        raise context.refuse("speculative_method", "must be set with speculative_model: draft_model, mtp or eagle3")
    if model.unload_keeps_process and model.sleep_level is None:
        raise context.refuse("unload_keeps_process", "needs sleep_level: its process is ended otherwise")
    if model.max_pixels is not None and "max_pixels" in model.mm_processor_kwargs:
        raise context.refuse("max_pixels", "is also in mm_processor_kwargs; leave one of them out")


def with_environment(model: VllmModel, context: ModelContext) -> VllmModel:
    """Returns the settings with those that they leave to variables of the runner API.

    Raises INVALID_ARGUMENT naming a variable with an invalid value.
    """
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


def model_engine(
    model: VllmModel,
    context: ModelContext,
    facts: ModelFacts,
    make_backend: Callable[[], Backend],
    *,
    habits: EngineHabits,
    abilities: Abilities,
) -> ModelEngine:
    """Returns the engine of a model, whose memory is forecast from these facts of its files."""
    draft = None if model.speculative_model is None else Path(model.speculative_model).expanduser()
    forecast = ForecastModel(
        name=model.location,
        files=ModelFiles(
            path=model.file,
            draft=draft if draft and draft.is_dir() else None,
            adapters=tuple(file for each in model.served_adapters if (file := each.digested_file) is not None),
        ),
        context_tokens=model.slot_context_tokens,
        slots=model.slots,
        parameters=configured_parameters(model),
        habits=habits,
        manifest_bytes=manifest_bytes_of(model.memory_mb),
    )
    return ModelEngine(
        make_backend=make_backend,
        operations=operations_of(model),
        slots=model.slots,
        context_tokens=model.slot_context_tokens,
        forecast=VllmForecast(forecast, context.estimator, model, facts.shape),
        remote=bool(model.remote),
        timeouts=context.timeouts,
        abilities=abilities,
        unload_keeps_process=model.unload_keeps_process,
    )
