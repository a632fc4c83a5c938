"""Fields of an ApplyRequest, as the registry names them, in the words of the document they came from."""

import re

_DECLARED = re.compile(
    r"^declarations\[(\d+)\](?:\.(?:model\.manifest|model|agent\.behaviour|agent|runner|pool|route)(?=\.|$))?\.?"
)
_RECIPE = re.compile(r"(?<=by_mesh)\.(?:http|command|wake_on_lan)(?=\.|$)")
_SNAKE = re.compile(r"_([a-z])")
_PARAMETERS = "default_params."
# Fields of a message that have another name in documents.
_RENAMED = {"repetition_policy": "repetition", "budget": "budget_seconds"}


def declared_field(field: str) -> tuple[int, str] | None:
    """Index of the document and the field in it, empty for all of it; None for a field of no document.

    "declarations[2].model.manifest.pool_name" is (2, "poolName").
    """
    found = _DECLARED.match(field)
    return (int(found[1]), document_field(field[found.end() :])) if found is not None else None


def document_field(field: str) -> str:
    """A field of a message by its name in documents; parameters of agents have the same name in both."""
    own, parameters, name = _RECIPE.sub("", field).partition(_PARAMETERS)
    return _camel(_RENAMED.get(own, own) + parameters) + name


def _camel(name: str) -> str:
    return _SNAKE.sub(lambda found: found[1].upper(), name)
