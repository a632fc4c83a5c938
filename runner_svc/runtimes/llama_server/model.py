"""Capabilities of a llama.cpp model according to its files, and checks of its adapters."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from runner_svc.memory.estimate import FileForecast
from runner_svc.model_files.gguf import is_gguf, read_gguf_header
from runner_svc.policy.template_capabilities import capabilities_of_templates
from runner_svc.runtimes.llama_server.arguments import (
    ADAPTER_FLAGS,
    DRAFT_FLAGS,
    PROJECTOR_FLAGS,
    habits_of,
    load_values,
    names_flag,
    names_template,
    operations_of,
    reranks,
    shares_between_slots,
)
from runner_svc.runtimes.llama_server.llama_server_backend import LlamaServerBackend
from runner_svc.runtimes.llama_server.runtime import LlamaAdapter, LlamaServerModel, llama_command
from runner_svc.runtimes.model_engine import ModelContext, ModelEngine, file_engine, forecast_model
from weft.kernel.errors.error_tree import WeftError
from weft.kernel.requests.capabilities import UNKNOWN, Capabilities
from weft.kernel.requests.request_values import Skill

_MEDIA = frozenset({Skill.IMAGE, Skill.AUDIO})
_USUAL_PROJECTOR = Capabilities(skills=frozenset({Skill.IMAGE}))
"""Audio is unknown in this case."""
_HUB_FLAGS = ("-hf", "-hfr", "--hf-repo", "-hff", "--hf-file", "--mmproj-auto")
"""Flags with which the server may find a projector automatically."""


def file_capabilities(model: LlamaServerModel, templates: Sequence[str]) -> Capabilities:
    """Returns the capabilities that a model's files show. Blocks while reading a projector's header."""
    text = Capabilities(skills=frozenset({Skill.TEXT}))
    shown = UNKNOWN if names_template(model) else capabilities_of_templates(templates)
    return text.completed_by(_media_capabilities(model)).completed_by(shown)


def _media_capabilities(model: LlamaServerModel) -> Capabilities:
    if model.projector_file is not None:
        return projector_capabilities(model.projector_file)
    if names_flag(model.extra_arguments, PROJECTOR_FLAGS):
        return _USUAL_PROJECTOR
    return UNKNOWN if names_flag(model.extra_arguments, _HUB_FLAGS) else Capabilities(lacking=_MEDIA)


def projector_capabilities(file: Path) -> Capabilities:
    """Returns what a projector encodes according to its header; if unknown, images, as most do."""
    try:
        header = read_gguf_header(file) if is_gguf(file) else None
    except (OSError, WeftError):
        header = None
    flags = {} if header is None else {Skill.IMAGE: header.encodes_images, Skill.AUDIO: header.encodes_audio}
    # A flag that is off counts only if the other one is on.
    found = frozenset(skill for skill, flag in flags.items() if flag)
    return Capabilities(skills=found, lacking=_MEDIA - found) if found else _USUAL_PROJECTOR


_SEPARATORS = (":", ",")
"""Separators of files and scales in the server's flag."""


def check_adapters(model: LlamaServerModel, context: ModelContext) -> None:
    """Raises INVALID_ARGUMENT naming the setting if the server could not load or isolate the adapters."""
    if not model.adapters:
        return
    if reranks(model):
        raise context.refuse("adapters", "are for models that generate, and this one only ranks")
    if names_flag(model.extra_arguments, ADAPTER_FLAGS):
        raise context.refuse("adapters", f"cannot be combined with {ADAPTER_FLAGS[0]} among extra_arguments")
    if shares_between_slots(model.extra_arguments):
        # That cache ignores which adapter a prompt was computed with.
        raise context.refuse("adapters", "cannot be combined with --cache-ram, which mixes up their cached prompts")
    architecture = _architecture_of(model)
    for index, adapter in enumerate(model.adapters):
        if not adapter.file.is_file():
            context.require_file(f"adapters[{index}].path", adapter.file)
        elif (fault := _fault(adapter, architecture)) is not None:
            raise context.refuse(f"adapters[{index}].path", fault)


def _architecture_of(model: LlamaServerModel) -> str:
    """Returns the model's architecture from its file; empty: unknown."""
    try:
        return read_gguf_header(model.file).architecture
    except (WeftError, OSError):
        return ""


def _fault(adapter: LlamaAdapter, architecture: str) -> str | None:
    """Returns why the server cannot load an adapter for this architecture; None: no known reason."""
    file = adapter.file
    if any(separator in str(file) for separator in _SEPARATORS):
        return f"must have neither {' nor '.join(map(repr, _SEPARATORS))} in it: {file}"
    try:
        header = read_gguf_header(file)
    except (WeftError, OSError) as error:
        return f"cannot be read as an adapter: {getattr(error, 'message', error)}"
    if (header.kind, header.adapter_kind) != ("adapter", "lora"):
        return f"is not a LoRA adapter (its kind: {header.kind or 'unknown'}): {file}"
    if architecture and header.architecture != architecture:
        return f"is for models of the architecture {header.architecture}, and this one is {architecture}"
    return None


def build(model: LlamaServerModel, context: ModelContext) -> ModelEngine:
    """Returns the engine of a model; see Runtime.build."""
    context = replace(context, command=llama_command(context.command, context.environments))
    for setting, file, flags in (
        ("mmproj_path", model.projector_file, PROJECTOR_FLAGS),
        ("draft_model_path", model.draft_file, DRAFT_FLAGS),
    ):
        if file is not None and names_flag(model.extra_arguments, flags):
            raise context.refuse(setting, f"is also set by {flags[0]} in extra_arguments; omit one of them")
        context.require_file(setting, file)
    check_adapters(model, context)
    return file_engine(
        model,
        context,
        LlamaServerBackend,
        FileForecast(forecast_model(model, habits_of(model), load_values(model)), context.estimator),
        operations=operations_of(model),
        capabilities=lambda templates: file_capabilities(model, templates),
    )
