"""The options that say how a model is loaded: shared by `weft load` and by those who sign one."""

from collections.abc import Sequence
from typing import Annotated

import typer

from weft.kernel.errors import invalid_field
from weft.kernel.sizes import parse_size
from weft.resources.operation_documents import MAX_LOAD_PARAMETERS, LoadSettings, LoadValue
from weft.resources.operation_messages import MEBIBYTE

ContextOption = Annotated[
    int | None, typer.Option("--ctx", "--context-tokens", min=16, max=16_777_216, help="Context of one slot in tokens.")
]
QuantizationOption = Annotated[
    str | None, typer.Option("--quantization", "-q", help="A declared variant of the model, such as q8_0.")
]
BudgetOption = Annotated[
    str | None, typer.Option("--budget", metavar="SIZE", help="Most accelerator memory it may take, such as 8GiB.")
]
EvictOption = Annotated[str, typer.Option("--evict", metavar="MODEL", help="Unload this model first.")]
ReplicasOption = Annotated[
    int, typer.Option("--replicas", min=0, max=64, help="Of a pool: how many members are loaded afterwards.")
]
PinOption = Annotated[bool, typer.Option("--pin", help="Never evict it for another model.")]
KeepAliveOption = Annotated[
    str | None,
    typer.Option("--keep-alive", metavar="TIME", help="How long it stays after a request: 5m, 0, or -1 for ever."),
]
SetOption = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="NAME=VALUE", help="Another setting of its engine; `weft describe` lists them."),
]


def load_settings(
    *,
    context_tokens: int | None,
    quantization: str | None,
    budget: str | None,
    pin: bool,
    keep_alive: str | None,
    parameters: Sequence[str],
) -> LoadSettings:
    """What the options say. Raises INVALID_ARGUMENT naming the option."""
    return LoadSettings(
        context_tokens=context_tokens,
        quantization=quantization,
        memory_budget_mb=None if budget is None else max(1, parse_size(budget, "--budget") // MEBIBYTE),
        keep_alive=keep_alive,
        pin=pin,
        parameters=parse_parameters(parameters),
    )


def parse_parameters(words: Sequence[str]) -> dict[str, LoadValue]:
    """`name=value` each: numbers as numbers, true and false as flags, all else as words.

    A word that looks like a flag to us but is one of the engine's own, such as on and off, is left a word: only true
    and false are flags. Raises INVALID_ARGUMENT.
    """
    if len(words) > MAX_LOAD_PARAMETERS:
        raise invalid_field("--set", f"at most {MAX_LOAD_PARAMETERS}")
    found: dict[str, LoadValue] = {}
    for word in words:
        name, equals, value = word.partition("=")
        if not (name and equals and value):
            raise invalid_field("--set", f"must be NAME=VALUE, such as cache_type_k=q8_0; it is {word[:64]}")
        if name in found:
            raise invalid_field("--set", f"{name[:64]} is given twice")
        found[name] = _value(value)
    return found


def _value(text: str) -> LoadValue:
    if text in ("true", "false"):
        return text == "true"
    for number in (int, float):
        try:
            return number(text)
        except ValueError:
            continue
    return text
