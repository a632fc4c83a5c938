"""Infers what a runner of weft.yaml does not set: the runtime, and the address of its models."""

import json
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from runner_svc.policy.engine_choice import CONFIGURATION, WeightFormat, folder_format
from runner_svc.runtimes.runtime_settings import SourcedModelSettings
from runner_svc.runtimes.table import ATTACHED_RUNTIME, DEFAULT_RUNTIME, RUNTIME_OF_FORMAT, find_runtime
from weft.kernel.errors.error_tree import FieldError, WeftError, invalid_field, refused_together
from weft.kernel.models.model_source import PathSource, parse_source
from weft_app.config.document import Document, location_of, value_of

_URL, _RUNTIME, _MODELS = "url", "runtime", "models"
_SOURCE, _HUB_SETTING = "source", "model"
_FILES = ("path", _HUB_SETTING, _SOURCE)
"""Settings that specify the files of a model."""
_OF_SERVER = (_URL, "api_key_env")
"""Settings of a runner that its models without a `url` inherit."""
MAX_CONFIGURATION_BYTES = 1024**2


def with_inferred(document: Document) -> Document:
    """Returns the document of `infer`. Raises INVALID_ARGUMENT if a runtime cannot be inferred."""
    found = infer(document)
    if found.refused:
        raise refused_together(list(found.refused.values()))
    return found.document


@dataclass(frozen=True, slots=True, kw_only=True)
class Inferred:
    """A document with inferred settings."""

    document: Document
    refused: Mapping[int, FieldError]
    """Errors of runners without an inferable runtime, by index."""


def infer(document: Document) -> Inferred:
    """Adds missing runtimes of runners, and the addresses of their models.

    Never changes what is written. Models of one runner that need several runtimes are an error of that runner.
    """
    runners = value_of(document.get("runners"))
    if not isinstance(runners, list):
        return Inferred(document=document, refused={})
    inferred, refused = [], {}
    for index, each in enumerate(runners):
        try:
            inferred.append(_inferred(each, index) if isinstance(each, dict) else each)
        except FieldError as error:
            refused[index] = error
            inferred.append(each)
    if all(one is other for one, other in zip(inferred, runners, strict=True)):
        return Inferred(document=document, refused=refused)
    # Keeps the list's position in the file.
    runners = type(runners)(inferred) if type(runners) is list else _like(runners, inferred)
    return Inferred(document={**document, "runners": runners}, refused=refused)


def _like(given: list[Any], items: list[Any]) -> list[Any]:
    made = type(given)(items)
    made.source = given.source  # type: ignore[attr-defined]
    return made


def _inferred(runner: Document, index: int) -> Document:
    models = value_of(runner.get(_MODELS))
    found = [each for each in models if isinstance(each, dict)] if isinstance(models, list) else []
    added: Document = {}
    if value_of(runner.get(_RUNTIME)) is None:
        runtime = _runtime_of(runner, found, index)
        if runtime != DEFAULT_RUNTIME:
            added[_RUNTIME] = runtime
    if value_of(runner.get(_URL)) is not None:
        if _MODELS not in runner:
            added[_MODELS] = []
        elif any(_URL not in each for each in found):
            own = {name: runner[name] for name in _OF_SERVER if name in runner}
            laid = [{**own, **each} if isinstance(each, dict) and _URL not in each else each for each in models]
            added[_MODELS] = _like(models, laid) if hasattr(models, "source") else laid
    if not added:
        return runner
    made = type(runner)({**runner, **added})
    if hasattr(runner, "source"):
        made.source = runner.source  # type: ignore[attr-defined]
    return made


def _runtime_of(runner: Document, models: list[Document], index: int) -> str:
    """Returns the runtime for a runner without one. Raises INVALID_ARGUMENT if its models need several."""
    if value_of(runner.get(_URL)) is not None:
        return ATTACHED_RUNTIME
    needed = {runtime: why for model in models for runtime, why in _needed(model)}
    if len(needed) > 1:
        reasons = ", ".join(f"{runtime} for {why}" for runtime, why in sorted(needed.items()))
        raise invalid_field(
            f"runners.{index}.{_RUNTIME}",
            f"must be named, or the models put into their own runners: they need {reasons}{_at(runner)}",
        )
    return next(iter(needed), DEFAULT_RUNTIME)


def _needed(model: Document) -> Iterator[tuple[str, str]]:
    """Yields the runtime that a model needs for its address, files or source, with the reason; nothing if any would do.

    Raises INVALID_ARGUMENT if the runtime does not have the setting that specifies the files.
    """
    name = value_of(model.get("name"))
    if value_of(model.get(_URL)) is not None:
        yield ATTACHED_RUNTIME, f"the url of {name}"
        return
    setting = next((each for each in _FILES if value_of(model.get(each)) is not None), None)
    if setting is None:
        return
    text = value_of(model[setting])
    weights = _format_at(_path_of(text, setting)) if isinstance(text, str) else None
    if weights is None:
        # A repository id of a hub is a folder for engines with `model`.
        weights = WeightFormat.SAFETENSORS if setting == _HUB_SETTING else WeightFormat.GGUF
    runtime = RUNTIME_OF_FORMAT[weights]
    _require_setting(runtime, setting, model, weights)
    yield runtime, f"the {setting} of {name}"


def _require_setting(runtime: str, setting: str, model: Document, weights: WeightFormat) -> None:
    found = find_runtime(runtime)
    if found is None or setting == _SOURCE or not issubclass(found.settings, SourcedModelSettings):
        return
    takes = found.settings.files_setting
    if takes != setting:
        raise invalid_field(
            f"{value_of(model.get('name'))}.{setting}",
            f"is a folder of {weights.value}, which {runtime} loads: write `{takes}: {value_of(model[setting])}`"
            f"{_at(model[setting])}",
        )


def _path_of(text: str, setting: str) -> str:
    """Returns the path in a text; empty if it is another source."""
    if setting != _SOURCE:
        return text
    with suppress(FieldError):
        parsed = parse_source(text, _SOURCE)
        return parsed.path if isinstance(parsed, PathSource) else ""
    return ""


def _at(item: Any) -> str:
    where = location_of(item)
    return f" (in {where})" if where else ""


def _format_at(text: str) -> WeightFormat | None:
    """Returns the format of the weights in a folder; None if it is not a folder or no engine loads it."""
    if not text:
        return None
    try:
        folder = Path(text).expanduser()
        if not folder.is_dir():
            return None
        names = [each.name for each in folder.iterdir()]
    except (OSError, RuntimeError):  # RuntimeError: the home of an unknown user, which is refused later
        return None
    configuration: Mapping[str, object] = {}
    with suppress(OSError, ValueError, RecursionError), (folder / CONFIGURATION).open("rb") as file:
        read = json.loads(file.read(MAX_CONFIGURATION_BYTES))
        configuration = read if isinstance(read, dict) else {}
    try:
        return folder_format(names, configuration)
    except WeftError:
        return None
