"""The MODEL argument of a command: a name of the mesh, a source, or a path, with or without `./`."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from weft.kernel.errors.error_tree import invalid_field
from weft.kernel.models.model_source import GGUF, HUB_HOSTS, PathSource, SourceScheme, asked_source, is_source
from weft.kernel.models.short_names import short_names_hint, short_source
from weft.kernel.values.names import MAX_NAME_CHARS, is_model_name, is_name, require_name
from weft_app.cli.terminal import note

MODEL, SOURCE = "MODEL", "SOURCE"
_PREFIXES = ("agent/", "route/")
"""Prefixes of agents and routes among names of models."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AskedModel:
    """The parsed argument: a name of the mesh or a source."""

    name: str = ""
    source: str = ""


def asked_model(text: str) -> AskedModel:
    """Parses a file or folder that exists, a source, or a name of the mesh.

    Raises INVALID_ARGUMENT naming MODEL.
    """
    if text.startswith(_PREFIXES):
        return AskedModel(name=text)
    path = existing_path(text)
    if path is not None:
        return AskedModel(source=str(path))
    if not is_source(text):
        return AskedModel(name=require_name(text, MODEL))
    if _is_long_name(text):
        return AskedModel(name=text)
    source = asked_source(text, MODEL)
    if isinstance(source, PathSource):
        # A runner has another working folder, and may be on another machine.
        return AskedModel(source=str(Path(source.path).expanduser().absolute()))
    return AskedModel(source=str(source))


def _is_long_name(text: str) -> bool:
    """Whether a text is a model's name with more than one slash, which cannot be a source."""
    first = text.partition("/")[0]
    has_scheme = first.partition(":")[0].lower() in tuple(SourceScheme)
    return text.count("/") > 1 and is_model_name(text) and first not in HUB_HOSTS and not has_scheme


def asked_to_serve(text: str, options: Mapping[str, str]) -> AskedModel:
    """Parses MODEL as `asked_model`, taking the options for sources into account.

    `options` has the values of options that apply only to a model added from its source, by name. If one is set, a
    short name is its source even if the mesh serves a model of that name.
    Raises INVALID_ARGUMENT naming MODEL or the option.
    """
    given = [option for option, value in options.items() if value and require_name(value, option)]
    asked = asked_model(text)
    if asked.source or not given:
        return asked
    if (source := short_source(asked.name)) is None:
        raise invalid_field(given[0], "is for a source such as hf:OWNER/REPO, or a short name such as llama3.2")
    note(f"{asked.name} is {source}")
    return AskedModel(name=asked.name, source=source)


def existing_path(text: str) -> Path | None:
    """Returns the full path of an existing model file or folder; None if the text is not such a path."""
    try:
        path = Path(text).expanduser()
        # A bare word may also be a name, so it counts as a path only if it is a GGUF file.
        is_model = path.exists() if "/" in text else path.suffix.lower() == GGUF and path.is_file()
        return path.absolute() if is_model else None
    except (OSError, RuntimeError, ValueError):
        return None


def pulled_source(text: str) -> str:
    """Returns the source in a text: an existing path, a short name, or the source itself.

    Raises INVALID_ARGUMENT naming SOURCE for other words.
    """
    if not text.startswith(("/", ".", "~")) and existing_path(text) is not None:
        return f"./{text}"
    if is_source(text) or not is_name(text):
        return text
    source = short_source(text)
    if source is None:
        raise invalid_field(
            SOURCE, f"{text[:MAX_NAME_CHARS]} is neither a source nor a short name; {short_names_hint(text)}"
        )
    note(f"{text} is {source}")
    return source
