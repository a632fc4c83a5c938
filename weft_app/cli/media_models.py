"""The model of a command about images or sound, where none is named: the only one that has the operation."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from weft.documents.resource_kinds import ResourceKind
from weft.kernel.errors import WeftError, invalid_field
from weft.kernel.reasons import Reason
from weft_app.cli.mesh_documents import Document, connect_documents
from weft_app.cli.options import note

MODEL_OPTION = "--model"
_ACTIVE = "active"


@dataclass(frozen=True, slots=True, kw_only=True)
class MediaOperation:
    """What a command asks a model for."""

    word: str
    does: str
    """What such a model does, such as "makes images"."""
    engines: str
    """Runtimes that offer it, as they are installed."""


IMAGES = MediaOperation(word="image", does="makes images", engines="diffusers (`weft runtime install diffusers`)")
TRANSCRIPTIONS = MediaOperation(
    word="transcription",
    does="transcribes recordings",
    engines="faster_whisper (`weft runtime install faster_whisper`)",
)
SPEECH = MediaOperation(
    word="speech",
    does="speaks",
    engines="espeak_ng (the program espeak-ng), piper (`weft runtime install speech`)",
)


def chosen_model(asked: str, operation: MediaOperation, home: Path) -> str:
    """Returns the model to ask: the named one, or the only one with the operation, which is said on stderr.

    Raises MODEL_NOT_FOUND where there is none, INVALID_ARGUMENT naming --model where there are several.
    """
    if asked:
        return asked
    with connect_documents(home) as mesh:
        models = mesh.documents(ResourceKind.MODEL)
    name = only_name(models, operation)
    note(f"model {name}")
    return name


def only_name(models: Sequence[Document], operation: MediaOperation) -> str:
    """Returns the model, or the pool of several, that is the only one with an operation. Raises as `chosen_model`."""
    found = [each for each in models if operation.word in each.get("operations", ())]
    able = [model for model in found if model["status"]["state"] == _ACTIVE] or found
    if not able:
        message = (
            f"no model of this mesh {operation.does}; runtimes that do: {operation.engines}; "
            "docs/media.md has the models for weft.yaml"
        )
        raise WeftError(Reason.MODEL_NOT_FOUND, message)
    if len(able) == 1:
        return str(able[0]["name"])
    pools = {str(model["status"]["pool"]) for model in able}
    if len(pools) == 1:
        return pools.pop()
    names = ", ".join(sorted(model["name"] for model in able))
    raise invalid_field(MODEL_OPTION, f"name one of {names}")
