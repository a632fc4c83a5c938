"""A vLLM model: checks of its settings, settings from the environment, and its engine."""

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from typing_extensions import override

from runner_svc.memory.estimate import (
    FileForecast,
    ForecastModel,
    MemoryEstimator,
    ModelFacts,
    ModelFiles,
    manifest_bytes_of,
    read_model_facts,
)
from runner_svc.policy.load_options import LoadPlan
from runner_svc.policy.memory_estimate import CONTEXT_STEP, MemorySettings, ModelShape
from runner_svc.runtimes.model_engine import ModelContext, ModelEngine
from runner_svc.runtimes.vllm.arguments import (
    LORA_RANKS,
    OWN_FLAGS,
    bytes_per_token,
    cache_bytes_per_device,
    configured_parameters,
    operations_of,
)
from runner_svc.runtimes.vllm.runtime import (
    _SKILLS,
    ADAPTER_CONFIG,
    ADAPTER_WEIGHTS,
    ENVIRONMENT,
    PROGRAM,
    RUNTIME,
    VllmAdapter,
    VllmModel,
)
from runner_svc.runtimes.vllm.vllm_backend import VllmBackend
from weft.kernel.errors.error_tree import invalid_field
from weft.kernel.requests.capabilities import Capabilities
from weft.kernel.requests.request_values import Skill

_LOCAL = ("/", "~", ".")
"""Prefixes that distinguish a path from a hub id."""


def check_adapters(model: VllmModel, context: ModelContext) -> None:
    """Raises INVALID_ARGUMENT naming the setting for adapters that vLLM could not load."""
    if not model.adapters:
        return
    if model.kind != "generation":
        raise context.refuse("adapters", f"are for models of kind generation, not {model.kind}")
    for index, adapter in enumerate(model.adapters):
        fault = _fault(adapter)
        if fault is not None:
            raise context.refuse(f"adapters[{index}].path", fault)
        if adapter.rank > LORA_RANKS[-1]:
            message = f"has a rank of {adapter.rank}, and vLLM supports at most {LORA_RANKS[-1]}"
            raise context.refuse(f"adapters[{index}].path", message)


def _fault(adapter: VllmAdapter) -> str | None:
    """Returns why an adapter cannot be loaded; None: no known reason."""
    folder = adapter.folder
    if folder is None:
        return f"there is no folder {adapter.path}" if adapter.path.startswith(_LOCAL) else None
    for name in (ADAPTER_CONFIG, ADAPTER_WEIGHTS):
        if not (folder / name).is_file():
            return f"is not a PEFT adapter: it has no {name}: {folder}"
    if not adapter.rank:
        return f"{ADAPTER_CONFIG} has no LoRA rank `r`: {folder}"
    return None


_CACHE_TYPES: Mapping[float, str] = {1.0: "q8_0", 2.0: "f16", 4.0: "f32"}
"""The estimator's cache types by bytes per number; its 8-bit type is slightly larger."""


class VllmForecast(FileForecast):
    """Memory forecast of a model with one KV cache for all requests."""

    def __init__(
        self, forecast: ForecastModel, estimator: MemoryEstimator, model: VllmModel, shape: ModelShape | None
    ) -> None:
        super().__init__(forecast, estimator)
        self._settings_of_model = model
        self._shape = shape

    @override
    def _settings(self, plan: LoadPlan) -> MemorySettings:
        settings, model, shape = super()._settings(plan), self._settings_of_model, self._shape
        if shape is None or not shape.keys_per_token:
            return settings
        values = {**configured_parameters(model), **plan.parameters}
        per_token = bytes_per_token(model, values, shape)
        kind = _CACHE_TYPES[per_token / (shape.keys_per_token + shape.values_per_token)]
        cache_bytes = cache_bytes_per_device(model, values, shape, devices=1)
        context = settings.context_tokens
        if cache_bytes is not None:
            devices = (model.tensor_parallel or 1) * (model.pipeline_parallel or 1)
            given = devices if "kv_cache_memory_bytes" in values else 1
            context = max(CONTEXT_STEP, int(given * cache_bytes / per_token / settings.slots))
        return MemorySettings(
            context_tokens=context,
            slots=settings.slots,
            cache_type_k=kind,
            cache_type_v=kind,
        )


UTILIZATION_VARIABLE = "VLLM_GPU_MEMORY_UTILIZATION"
CACHING_VARIABLE = "VLLM_ENABLE_PREFIX_CACHING"
_FLAGS = {"1": True, "true": True, "yes": True, "on": True, "0": False, "false": False, "no": False, "off": False}
_FOR_GENERATION = ("speculative_config", "tool_call_parser")


def check_model(model: VllmModel, context: ModelContext) -> None:
    """Raises INVALID_ARGUMENT naming a setting that contradicts another."""
    for index, argument in enumerate(model.extra_arguments):
        if (why := OWN_FLAGS.get(argument.partition("=")[0])) is not None:
            raise context.refuse(f"extra_arguments[{index}]", f"cannot be {argument.partition('=')[0]}: {why}")
    context.require_file("chat_template_path", model.chat_template_file)
    if model.kind != "generation":
        for setting in _FOR_GENERATION:
            if getattr(model, setting):
                raise context.refuse(setting, f"is for models of kind generation, not {model.kind}")


def with_environment(model: VllmModel, context: ModelContext) -> VllmModel:
    """Completes the settings with the runner's variables of the runner API.

    Raises INVALID_ARGUMENT naming a variable with an invalid value.
    """
    utilization = context.environment.get(UTILIZATION_VARIABLE, "").strip()
    if utilization and model.gpu_memory_utilization is None:
        share = 0.0
        with suppress(ValueError):
            share = float(utilization)
        if not 0 < share <= 1:
            raise invalid_field(UTILIZATION_VARIABLE, "must be a number above 0 and at most 1")
        model = replace(model, gpu_memory_utilization=share)
    caching = context.environment.get(CACHING_VARIABLE, "").strip().lower()
    if caching and model.prefix_caching is None:
        if caching not in _FLAGS:
            raise invalid_field(CACHING_VARIABLE, "must be true or false")
        model = replace(model, prefix_caching=_FLAGS[caching])
    return model


def build(model: VllmModel, context: ModelContext) -> ModelEngine:
    """Returns the engine of a model; see Runtime.build."""
    check_model(model, context)
    check_adapters(model, context)
    model = with_environment(model, context)
    if not context.command:
        model = replace(model, kv_events=model.kv_events is not False)
        context = replace(context, command=(str(context.environments.environment_program(ENVIRONMENT, PROGRAM)),))
    facts = ModelFacts() if model.folder is None else read_model_facts(model.folder)
    context = replace(context, trained_context_tokens=facts.context_tokens)
    # Capabilities that the settings do not determine depend on the model, and are tried.
    limits = {_SKILLS[kind]: count for kind, count in model.limit_mm_per_prompt.items() if kind in _SKILLS}
    extra = {skill for skill, count in limits.items() if count}
    tools = {Skill.TOOLS} if model.tool_call_parser is not None else set()
    draft = Path(str(model.speculative_config["model"])).expanduser() if "model" in model.speculative_config else None
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
        habits=RUNTIME.habits,
        manifest_bytes=manifest_bytes_of(model.memory_mb),
    )
    return ModelEngine(
        make_backend=lambda: VllmBackend(model, context, shape=facts.shape),
        operations=operations_of(model),
        slots=model.slots,
        context_tokens=model.slot_context_tokens,
        forecast=VllmForecast(forecast, context.estimator, model, facts.shape),
        remote=bool(model.remote),
        timeouts=context.timeouts,
        capabilities=Capabilities(
            skills=frozenset({Skill.TEXT, *extra, *tools}), lacking=frozenset(limits.keys() - extra)
        ),
    )
