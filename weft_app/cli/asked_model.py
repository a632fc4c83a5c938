"""The model that a command is asked for: a name of the mesh, a source, or a path, which may lack its `./`."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from weft.kernel.errors import invalid_field
from weft.kernel.model_source import GGUF, HUB_HOSTS, PathSource, SourceScheme, asked_source, is_source
from weft.kernel.names import MAX_NAME_CHARS, is_model_name, is_name, require_name
from weft.kernel.short_names import short_names_hint, short_source
from weft_app.cli.options import note

MODEL, SOURCE = "MODEL", "SOURCE"
_PREFIXES = ("agent/", "route/")
"""What begins the name of an agent or a route where models are named as well."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AskedModel:
    """What is to be run: a name of the mesh, or a source."""

    name: str = ""
    source: str = ""


def asked_model(text: str) -> AskedModel:
    """Returns what a text names: a file or folder that exists, a source, or a name of the mesh.

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
        # A runner has a working folder of its own, and may be on another machine.
        return AskedModel(source=str(Path(source.path).expanduser().absolute()))
    return AskedModel(source=str(source))


def _is_long_name(text: str) -> bool:
    """Whether a text is a model's name with more than an owner before it, which no source looks like."""
    first = text.partition("/")[0]
    has_scheme = first.partition(":")[0].lower() in tuple(SourceScheme)
    return text.count("/") > 1 and is_model_name(text) and first not in HUB_HOSTS and not has_scheme


def asked_to_serve(text: str, options: Mapping[str, str]) -> AskedModel:
    """Returns the model that a text names.

    `options`: the values of options that apply only to a model which is added from its source, by the options' names.
    Where one has a value, a short name stands for its source, whether or not the mesh serves a model of that name.
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
    """Returns the whole path of a model's file or folder that a text names; None: it names none that is there."""
    try:
        path = Path(text).expanduser()
        # A bare word may be a name as well: only a file that cannot be anything else is one.
        is_model = path.exists() if "/" in text else path.suffix.lower() == GGUF and path.is_file()
        return path.absolute() if is_model else None
    except (OSError, RuntimeError, ValueError):
        return None


def pulled_source(text: str) -> str:
    """Returns the source that a text names: a path that is there, a short name, or the source itself.

    Raises INVALID_ARGUMENT naming SOURCE for a word that is none of these.
    """
    marked = with_marked_path(text)
    if marked != text or is_source(text) or not is_name(text):
        return marked
    source = short_source(text)
    if source is None:
        raise invalid_field(SOURCE, f"{text[:MAX_NAME_CHARS]} is no source and no short name; {short_names_hint(text)}")
    note(f"{text} is {source}")
    return source


def with_marked_path(text: str) -> str:
    """Returns a source, with `./` before a relative path that is there."""
    if text.startswith(("/", ".", "~")) or existing_path(text) is None:
        return text
    return f"./{text}"
