"""The settings of a model of espeak-ng in `weft.yaml`."""

from dataclasses import dataclass
from typing import Annotated

from annotated_types import Ge, Le

from runner_svc.runtimes.espeak_ng.speaker import MAX_WORDS_PER_MINUTE, MIN_WORDS_PER_MINUTE, USUAL_WORDS_PER_MINUTE
from runner_svc.runtimes.speech_settings import SpeechSettings
from weft.kernel.settings import PUBLIC, PathText


@dataclass(frozen=True, slots=True, kw_only=True)
class EspeakModel(SpeechSettings):
    """The program espeak-ng with all its voices, which are in no files of yours."""

    program: PathText | None = None
    """The program. Default: `espeak-ng` on PATH."""
    words_per_minute: Annotated[int, Ge(MIN_WORDS_PER_MINUTE), Le(MAX_WORDS_PER_MINUTE), PUBLIC] = (
        USUAL_WORDS_PER_MINUTE
    )
    """Its speed where a request asks for 1, or for none."""
    slots: Annotated[int, Ge(1), Le(1024), PUBLIC] = 2
    """Requests it works on at once."""

    @property
    def location(self) -> str:
        """The program."""
        return str(self.program or PROGRAM)


PROGRAM = "espeak-ng"
