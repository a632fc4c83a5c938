"""The surfaces that there are."""

from collections.abc import Sequence

from gateway.parts import InferenceParts
from gateway.tasks.chat import ChatSurface
from gateway.tasks.completions import CompletionSurface
from gateway.tasks.embeddings import EmbeddingSurface
from gateway.tasks.responses import ResponsesSurface
from gateway.tasks.surface import Surface, Surfaces


def surfaces_of(parts: InferenceParts, further: Sequence[Surface] = ()) -> Surfaces:
    """Those of one gateway."""
    return Surfaces(
        [ChatSurface(parts), CompletionSurface(parts), EmbeddingSurface(parts), ResponsesSurface(parts), *further]
    )
