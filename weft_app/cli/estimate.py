"""`weft estimate`: the accelerator memory that a model will take, before it is loaded."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Annotated, Any

import typer

from runner_svc.memory.estimate import ModelFacts, ModelFiles, known_model, loaded_facts
from runner_svc.memory.learned_memory import LearnedMemory, learned_file
from runner_svc.policy.memory_estimate import (
    CACHE_TYPE_BYTES,
    MEBIBYTE,
    EngineHabits,
    MemoryEstimate,
    MemorySettings,
    estimate_memory,
    settings_for,
)
from runner_svc.runtimes.model_engine import model_files
from runner_svc.runtimes.runtime import Runtime
from runner_svc.runtimes.settings import DEFAULT_CONTEXT_TOKENS, FileModelSettings, ModelSettings
from weft.kernel.errors import WeftError, invalid_field
from weft.kernel.reasons import Reason
from weft.kernel.units import size_words
from weft_app.cli.options import DEFAULT_HOME, ConfigOption, HomeOption, OutputFormat, OutputOption
from weft_app.cli.output import Column, print_document, print_table
from weft_app.compose.demo import DEMO_MODEL, demo_runner
from weft_app.compose.home import WeftHome
from weft_app.config.loader import load_config

if TYPE_CHECKING:
    from runner_svc.policy.load_plan import LoadValue

DEFAULT_SLOTS = 4
"""The default of a model in a configuration file."""
_COLUMNS = (Column("PART", lambda row: row["name"]), Column("SIZE", lambda row: size_words(row["bytes"])))
_WORDS: Mapping[str, str] = MappingProxyType(
    {
        "learned": "earlier loads",
        "manifest": "configuration",
        "header": "file's header",
        "file_size": "file's size",
        "name": "name",
    }
)


_CACHE_TYPE_HELP = "Type of the cache: " + ", ".join(CACHE_TYPE_BYTES)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Subject:
    """The model that is estimated."""

    name: str
    files: ModelFiles | None = None
    model: ModelSettings | None = None
    """Its configuration; None: it is not configured."""
    runtime: Runtime[Any] | None = None
    runner: str = ""


def estimate(
    target: Annotated[str, typer.Argument(metavar="PATH|NAME", help="File, folder, configured model, or just a name.")],
    ctx: Annotated[int | None, typer.Option("--ctx", min=1, max=16_777_216, help="Context of one slot.")] = None,
    slots: Annotated[int | None, typer.Option("--slots", min=1, max=1024, help="Requests at once.")] = None,
    cache_type: Annotated[
        str, typer.Option("--cache-type", help="Type of the cache: " + ", ".join(CACHE_TYPE_BYTES))
    ] = "",
    config: ConfigOption = None,
    home: HomeOption = DEFAULT_HOME,
    output: OutputOption = OutputFormat.TABLE,
) -> None:
    """Show what memory a model will take, and what the estimate comes from.

    Example: weft estimate ~/models/qwen-7b-q4_k_m.gguf --ctx 8192 --slots 2
    """
    if cache_type and cache_type not in CACHE_TYPE_BYTES:
        raise invalid_field("--cache-type", f"must be one of: {', '.join(CACHE_TYPE_BYTES)}")
    subject = _subject(target, config)
    settings = _settings(subject, ctx, slots, cache_type)
    facts = ModelFacts() if subject.files is None else loaded_facts(subject.files)
    found = _estimate(subject, facts, settings, home)
    if found is None:
        raise WeftError(
            Reason.NOT_FOUND,
            f"there is no file and no configured model {target}, and the name does not say how large it is",
        )
    document = _document(subject, facts, settings, found)
    if output is OutputFormat.TABLE:
        _print(document)
    else:
        print_document(document, output)


def _subject(target: str, config: Path | None) -> _Subject:
    path = Path(target).expanduser()
    if path.exists():
        return _Subject(name=path.name, files=ModelFiles(path=path))
    runners = load_config(config).runners
    if runners is None and target == DEMO_MODEL:
        runners = (demo_runner(),)
    for runner in runners or ():
        for model in runner.models:
            if model.name == target:
                files = model_files(model) if isinstance(model, FileModelSettings) else None
                return _Subject(name=target, files=files, model=model, runtime=runner.engine, runner=runner.name)
    return _Subject(name=Path(target).name)


def _settings(subject: _Subject, ctx: int | None, slots: int | None, cache_type: str) -> MemorySettings:
    model, runtime = subject.model, subject.runtime
    parameters: dict[str, LoadValue] = {} if model is None or runtime is None else dict(runtime.load_values(model))
    if cache_type:
        parameters |= {"cache_type_k": cache_type, "cache_type_v": cache_type}
    usual_context = (None if model is None else model.context_tokens) or DEFAULT_CONTEXT_TOKENS
    usual_slots = DEFAULT_SLOTS if model is None else model.slots
    habits = EngineHabits() if runtime is None else runtime.habits
    return settings_for(ctx or usual_context, slots or usual_slots, parameters, habits)


def _estimate(subject: _Subject, facts: ModelFacts, settings: MemorySettings, home: Path) -> MemoryEstimate | None:
    model = subject.model
    measured: tuple[int, ...] = ()
    if model is not None and facts.identity is not None:
        state = WeftHome(home.expanduser().absolute()).state / "runners"
        measured = tuple(LearnedMemory(learned_file(state, subject.runner)).measurements(facts.identity, settings))
    memory_mb = model.memory_mb if isinstance(model, FileModelSettings) else None
    declared = None if memory_mb is None else memory_mb * MEBIBYTE
    return estimate_memory(known_model(subject.name, facts, declared, measured), settings)


def _document(subject: _Subject, facts: ModelFacts, settings: MemorySettings, found: MemoryEstimate) -> dict[str, Any]:
    return {
        "kind": "MemoryEstimate",
        "name": subject.name,
        "source": found.source.value,
        "bytes": found.bytes,
        "parts": [{"name": part.name, "bytes": part.bytes} for part in found.parts],
        "contextTokens": settings.context_tokens,
        "slots": settings.slots,
        "cacheTypeK": settings.cache_type_k,
        "cacheTypeV": settings.cache_type_v,
        "quantization": facts.quantization,
        "trainedContextTokens": facts.context_tokens,
    }


def _print(document: dict[str, Any]) -> None:
    basis = f"{document['contextTokens']} tokens in each of {document['slots']} slots"
    total = {"name": f"total (from its {_WORDS[document['source']]}; {basis})"}
    print_table([*document["parts"], total | {"bytes": document["bytes"]}], _COLUMNS)
