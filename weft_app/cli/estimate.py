"""`weft models estimate`: the accelerator memory that a model will take, before it is loaded."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import typer

from runner_svc.added_models_file import remembered_models
from runner_svc.memory.estimate import FileForecast, ModelFacts, ModelFiles, loaded_facts
from runner_svc.memory.learned_memory import LearnedMemory, learned_file
from runner_svc.model_store.store import ModelStore
from runner_svc.policy.load_options import AS_CONFIGURED
from runner_svc.policy.memory_estimate import (
    CACHE_TYPE_BYTES,
    MEBIBYTE,
    EngineHabits,
    MemoryEstimate,
    MemorySettings,
    estimate_memory,
    settings_for,
)
from runner_svc.runner_settings import ModelStoreSettings, RunnerSettings
from runner_svc.runtimes.runtime_settings import DEFAULT_CONTEXT_TOKENS, ModelSettings, StartedModelSettings
from weft.kernel.errors.error_tree import WeftError, invalid_field
from weft.kernel.errors.reasons import Reason
from weft.kernel.models.model_source import parse_source
from weft.kernel.values.unknown_names import unknown_name
from weft_app.cli.options import DEFAULT_HOME, HomeOption, MeshConfigOption, OutputFormat, OutputOption
from weft_app.cli.output import Column, print_document, print_table
from weft_app.compose.demo import configured_runners
from weft_app.compose.home import WeftHome
from weft_app.compose.model_sources import ModelSources
from weft_app.compose.served_models import runner_context
from weft_app.config.loader import load_files

DEFAULT_SLOTS = 4
"""As in the configuration."""
_COLUMNS = (Column("PART", "name"), Column("SIZE", "bytes", "size"))
_WORDS = {
    "learned": "earlier loads",
    "manifest": "configuration",
    "header": "file's header",
    "file_size": "file's size",
    "name": "name",
}

_PART_WORDS = {"compute": "compute, at most"}
"""An engine allocates its buffers as it needs them, so `weft ps` shows less."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Subject:
    name: str
    files: ModelFiles | None = None
    settings: MemorySettings | None = None
    """Settings of its configured load; None: it is not configured, or no engine of weft loads it."""
    model: ModelSettings | None = None
    runner: str = ""


def estimate(
    target: Annotated[
        str, typer.Argument(metavar="PATH|NAME", help="File, folder, configured model, or the name of any model.")
    ],
    ctx: Annotated[int | None, typer.Option(min=1, max=16_777_216, help="Context of one slot.")] = None,
    slots: Annotated[int | None, typer.Option(min=1, max=1024, help="Concurrent requests.")] = None,
    cache_type: Annotated[str, typer.Option(help="Type of the cache: " + ", ".join(CACHE_TYPE_BYTES))] = "",
    config: MeshConfigOption = None,
    home: HomeOption = DEFAULT_HOME,
    output: OutputOption = OutputFormat.TABLE,
) -> None:
    """Show the estimated memory of a model, and the source of the estimate.

    Example: weft models estimate ~/models/qwen-7b-q4_k_m.gguf --ctx 8192 --slots 2
    """
    if cache_type and cache_type not in CACHE_TYPE_BYTES:
        raise invalid_field("--cache-type", f"must be one of: {', '.join(CACHE_TYPE_BYTES)}")
    folder = WeftHome(home.expanduser().absolute())
    subject = _subject(target, folder, config, ctx, slots)
    settings = _settings(subject, ctx, slots, cache_type)
    facts = ModelFacts() if subject.files is None else loaded_facts(subject.files)
    found = _estimate(subject, facts, settings, folder)
    if found is None:
        raise _unknown(target, subject, _runners(folder, config))
    document = _document(subject, facts, settings, found)
    if output is OutputFormat.TABLE:
        _print(document)
    else:
        print_document(document, output)


def _runners(home: WeftHome, config: Path | None) -> Sequence[RunnerSettings]:
    return configured_runners(load_files(home.config_files(config)))


def _unknown(target: str, subject: _Subject, runners: Sequence[RunnerSettings]) -> WeftError:
    if subject.model is None:
        names = [name for runner in runners for model in runner.models for name in model.served_names]
        error = unknown_name("file or configured model", target, names)
        error.message += " (a name that contains the size of the model, such as qwen-7b, works too)"
        return error
    where = subject.model.location or "its server"
    return WeftError(
        Reason.NOT_FOUND,
        f"{target} cannot be estimated: {where} is not on this machine, and its name does not contain its size",
    )


def _subject(target: str, home: WeftHome, config: Path | None, ctx: int | None, slots: int | None) -> _Subject:
    path = Path(target).expanduser()
    if path.exists():
        return _Subject(name=path.name, files=ModelFiles(path=path))
    for runner in _runners(home, config):
        for model in runner.models:
            if target in model.served_names:
                files, settings = _inputs(model, runner, ctx, slots)
                return _Subject(name=model.name, files=files, settings=settings, model=model, runner=runner.name)
    return _added(target, home, ctx, slots) or _Subject(name=Path(target).name)


def _added(name: str, home: WeftHome, ctx: int | None, slots: int | None) -> _Subject | None:
    """Returns a model that was added to a runner of this home, such as by `weft run`, if its files are here."""
    sources = ModelSources(ModelStore(home.models), ModelStoreSettings())
    for added in remembered_models(home.state / "runners"):
        if added.name == name and (files := sources.found(parse_source(added.stored_source, "source"))) is not None:
            context = ctx or added.sizing.context_tokens or DEFAULT_CONTEXT_TOKENS
            sized = settings_for(context, slots or added.sizing.slots or DEFAULT_SLOTS, {}, EngineHabits())
            return _Subject(name=name, files=ModelFiles(path=files.path), settings=sized)
    return None


def _inputs(
    model: ModelSettings, runner: RunnerSettings, ctx: int | None, slots: int | None
) -> tuple[ModelFiles | None, MemorySettings | None]:
    """Returns the inputs of the runner's estimate; None: no engine of weft loads the model."""
    if not isinstance(model, StartedModelSettings):
        return None, None
    asked = replace(model, context_tokens=ctx or model.context_tokens, slots=slots or model.slots)
    # Nothing is started, so the program need not be installed.
    context = replace(runner_context(runner), command=runner.command or (model.name,))
    forecast = runner.engine.build(asked, replace(context, where=f"runners.{runner.name}.models.{model.name}")).forecast
    return forecast.inputs(AS_CONFIGURED) if isinstance(forecast, FileForecast) else (None, None)


def _settings(subject: _Subject, ctx: int | None, slots: int | None, cache_type: str) -> MemorySettings:
    settings = subject.settings
    if settings is None:
        model = subject.model
        usual_context = (None if model is None else model.context_tokens) or DEFAULT_CONTEXT_TOKENS
        usual_slots = DEFAULT_SLOTS if model is None else model.slots
        settings = settings_for(ctx or usual_context, slots or usual_slots, {}, EngineHabits())
    return replace(settings, cache_type_k=cache_type, cache_type_v=cache_type) if cache_type else settings


def _estimate(subject: _Subject, facts: ModelFacts, settings: MemorySettings, home: WeftHome) -> MemoryEstimate | None:
    model = subject.model
    measured: tuple[int, ...] = ()
    if model is not None and facts.identity is not None:
        learned = learned_file(home.state / "runners", subject.runner)
        measured = tuple(LearnedMemory(learned).measurements(facts.identity, settings))
    memory_mb: int | None = getattr(model, "memory_mb", None)
    declared = None if memory_mb is None else memory_mb * MEBIBYTE
    return estimate_memory(replace(facts, name=subject.name, manifest_bytes=declared, learned_bytes=measured), settings)


def _document(subject: _Subject, facts: ModelFacts, settings: MemorySettings, found: MemoryEstimate) -> dict[str, Any]:
    model = subject.model
    return {
        "kind": "MemoryEstimate",
        "name": subject.name,
        "source": found.source.value,
        "bytes": found.bytes,
        "parts": [{"name": part.name, "bytes": part.bytes} for part in found.parts],
        "embeds": settings.embeds,
        "contextTokens": settings.context_tokens,
        "slots": settings.slots,
        "cacheTypeK": settings.cache_type_k,
        "cacheTypeV": settings.cache_type_v,
        "quantization": facts.quantization,
        "trainedContextTokens": facts.context_tokens,
        "keptPromptBytes": model.max_kept_prompt_bytes if isinstance(model, StartedModelSettings) else 0,
    }


def _print(document: dict[str, Any]) -> None:
    basis = f"{document['contextTokens']} tokens in each of {document['slots']} slots"
    if document["embeds"]:
        basis += ", and texts to embed"
    parts = [part | {"name": _PART_WORDS.get(part["name"], part["name"])} for part in document["parts"]]
    total = {"name": f"total (from its {_WORDS[document['source']]}; {basis})"}
    kept = {"name": "kept prompts, maximum (host memory, not in the total)", "bytes": document["keptPromptBytes"]}
    print_table([*parts, total | {"bytes": document["bytes"]}, *([kept] if kept["bytes"] else [])], _COLUMNS)
