"""What the work of a request is counted in: tokens, or the unit of an image, a recording or a text that is spoken.

The work on media is known when the request arrives (`Arrival.work`); how many tokens an answer will have is not.
"""

from enum import StrEnum

from weft.kernel.request import Operation


class WorkUnit(StrEnum):
    """The unit of the work of a request."""

    TOKENS = "tokens"
    """Generated tokens."""
    STEP_MEGAPIXELS = "step_megapixels"
    """Steps of denoising, times the megapixels of all images."""
    AUDIO_SECONDS = "audio_seconds"
    """Seconds of a recording."""
    CHARACTERS = "characters"
    """Characters of a text that is spoken."""


def unit_of(operation: Operation) -> WorkUnit | None:
    """Return the unit of an operation; None: its work is not measured, as of embeddings."""
    match operation:
        case Operation.CHAT | Operation.COMPLETION:
            return WorkUnit.TOKENS
        case Operation.IMAGE:
            return WorkUnit.STEP_MEGAPIXELS
        case Operation.TRANSCRIPTION:
            return WorkUnit.AUDIO_SECONDS
        case Operation.SPEECH:
            return WorkUnit.CHARACTERS
        case _:
            return None


def media_unit_of(operation: Operation) -> WorkUnit | None:
    """Return the unit of an operation on media; None: it is none."""
    unit = unit_of(operation)
    return None if unit is WorkUnit.TOKENS else unit
