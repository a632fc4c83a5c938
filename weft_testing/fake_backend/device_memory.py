"""Memory of fake cards (weft_testing.fake_nvml): an engine that takes it, or dies for want of it.

A byte that was booked twice shows as the death of whoever comes second.
"""

import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from weft_testing.fake_nvml.folder import FOLDER_VARIABLE, FakeCards, OutOfCardMemoryError

_VISIBLE = "CUDA_VISIBLE_DEVICES"


def take_device_memory(amount: int, tensor_split: Sequence[float], environment: Mapping[str, str]) -> None:
    """Take `amount` bytes over the visible cards, in these proportions (none: alike), or end as llama.cpp does.

    As with CUDA, an empty CUDA_VISIBLE_DEVICES hides every card, and then nothing is taken.
    """
    cards = FakeCards(Path(environment[FOLDER_VARIABLE]))
    visible = visible_cards(len(cards.total_bytes()), environment)
    parts = split(amount, list(tensor_split) or [1.0] * len(visible)) if visible else []
    if len(parts) > len(visible):
        _die(f"invalid tensor split: {len(parts)} proportions for {len(visible)} devices")
    wanted = [(cards.card_at(index), part) for index, part in zip(visible, parts, strict=False)]
    try:
        cards.take(os.getpid(), wanted)
    except OutOfCardMemoryError as error:
        _die(f"cudaMalloc failed: out of memory\nCUDA error: out of memory\n  {error}")


def visible_cards(count: int, environment: Mapping[str, str]) -> list[int]:
    """Their numbers on the PCI bus."""
    named = environment.get(_VISIBLE)
    if named is None:
        return list(range(count))
    return [int(number) for number in named.split(",") if number]


def split(amount: int, proportions: Sequence[float]) -> list[int]:
    """`amount` in parts of these proportions, none lost by rounding."""
    whole = sum(proportions)
    ends = [round(amount * sum(proportions[: at + 1]) / whole) for at in range(len(proportions))]
    return [end - begin for begin, end in zip([0, *ends], ends, strict=False)]


def _die(words: str) -> None:
    print(words, file=sys.stderr, flush=True)  # noqa: T201 - a server's log
    os._exit(1)
