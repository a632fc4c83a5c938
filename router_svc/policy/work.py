"""What the work of a request is counted in: tokens, or the unit of an image, a recording or a text that is spoken.

The work on media is known when the request arrives (`PlacementRequest.work`); the tokens of an answer are not.
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


_MEDIA_UNITS = {
    Operation.IMAGE: WorkUnit.STEP_MEGAPIXELS,
    Operation.TRANSCRIPTION: WorkUnit.AUDIO_SECONDS,
    Operation.SPEECH: WorkUnit.CHARACTERS,
}
_UNITS = {Operation.CHAT: WorkUnit.TOKENS, Operation.COMPLETION: WorkUnit.TOKENS, **_MEDIA_UNITS}


def unit_of(operation: Operation) -> WorkUnit | None:
    """Return the unit of an operation; None: its work is not measured, as of embeddings."""
    return _UNITS.get(operation)


def media_unit_of(operation: Operation) -> WorkUnit | None:
    """Return the unit of an operation on media; None: it is none."""
    return _MEDIA_UNITS.get(operation)
