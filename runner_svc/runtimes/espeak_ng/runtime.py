"""The runtime espeak_ng: the speech synthesizer of Debian, which needs no files of a model."""

import shutil
from dataclasses import dataclass
from typing import Annotated

from annotated_types import Ge, Le

from runner_svc.policy.parameters import EngineParameters
from runner_svc.runtimes.runtime import Requirement, Runtime, deferred
from runner_svc.runtimes.speech_settings import SPEECH_ENVIRONMENT, SpeechSettings
from weft.kernel.errors import WeftError
from weft.kernel.reasons import Reason
from weft.kernel.settings import PUBLIC

PARAMETERS = EngineParameters(engine="espeak-ng")


@dataclass(frozen=True, slots=True, kw_only=True)
class EspeakModel(SpeechSettings):
    """The program espeak-ng with all its voices, which come with the program."""

    slots: Annotated[int, Ge(1), Le(1024), PUBLIC] = 2
    """Maximum number of concurrent requests."""

    @property
    def location(self) -> str:
        """The program."""
        return PROGRAM


PROGRAM = "espeak-ng"


REMEDY = f"apt-get install {PROGRAM}"


def _find(command: tuple[str, ...] | None) -> str:
    del command  # that of the server program
    found = shutil.which(PROGRAM)
    if found is None:
        raise WeftError(Reason.INVALID_ARGUMENT, f"there is no {PROGRAM} on PATH; run: {REMEDY}")
    return found


RUNTIME = Runtime(
    name="espeak_ng",
    summary="espeak-ng, the speech synthesizer of Debian",
    docs="docs/media.md",
    settings=EspeakModel,
    build=deferred("runner_svc.runtimes.espeak_ng.backend:build"),
    parameters=PARAMETERS,
    requirement=Requirement(name=PROGRAM, find=_find, remedy=REMEDY),
    environment=SPEECH_ENVIRONMENT,
    needs_environment=False,
    advice={
        "operations": "it only supports speech",
        "path": "its voices come with the program, see `espeak-ng --voices`",
    },
)
