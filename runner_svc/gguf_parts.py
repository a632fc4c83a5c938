"""Models that come in several GGUF files."""

import re
from dataclasses import replace
from pathlib import Path

from runner_svc.gguf_header import GgufHeader, broken_file, read_gguf_header

MAX_PARTS = 512
"""Files of one model; the largest known ones have about a hundred."""

_PART = re.compile(r"(?P<stem>.+)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf")


def model_parts(path: Path) -> tuple[Path, ...]:
    """The files of a model that comes in several, such as `m-00001-of-00003.gguf`, in their order; else the one.

    Raises INVALID_ARGUMENT for a name that cannot be.
    """
    found = _PART.fullmatch(path.name)
    if found is None:
        return (path,)
    number, count = int(found["number"]), int(found["count"])
    if not 1 <= number <= count or count > MAX_PARTS:
        raise broken_file(f"its name says that it is part {number} of {count}, and at most {MAX_PARTS} can be")
    return tuple(path.with_name(f"{found['stem']}-{part:05d}-of-{count:05d}.gguf") for part in range(1, count + 1))


def read_gguf_model(path: Path) -> GgufHeader:
    """The header of a model with the weights of all its parts. Blocks: call it in a thread.

    Raises as `read_gguf_header`, INVALID_ARGUMENT for a part that is missing, too.
    """
    parts = model_parts(path)
    if len(parts) == 1:
        return read_gguf_header(path)
    for number, part in enumerate(parts, start=1):
        if not part.is_file():
            raise broken_file(f"part {number} of {len(parts)} is missing")
    # The first one alone describes the model.
    first, *others = (read_gguf_header(part) for part in parts)
    return replace(
        first,
        weight_bytes=first.weight_bytes + sum(other.weight_bytes for other in others),
        tensor_count=first.tensor_count + sum(other.tensor_count for other in others),
    )
