"""The runtime espeak_ng: the speech synthesizer of Debian, which needs no files of a model."""

import shutil
from typing import TYPE_CHECKING

from runner_svc.environments.speech.environment import ENVIRONMENT
from runner_svc.runtimes.espeak_ng.parameters import PARAMETERS
from runner_svc.runtimes.espeak_ng.settings import PROGRAM, EspeakModel
from runner_svc.runtimes.runtime import Requirement, Runtime
from weft.kernel.errors import WeftError
from weft.kernel.reasons import Reason

if TYPE_CHECKING:
    from runner_svc.runtimes.model_engine import ModelContext, ModelEngine

REMEDY = f"apt-get install {PROGRAM}"


def _find(command: tuple[str, ...] | None) -> str:
    del command  # of the server program
    found = shutil.which(PROGRAM)
    if found is None:
        raise WeftError(Reason.INVALID_ARGUMENT, f"there is no {PROGRAM} on PATH; run: {REMEDY}")
    return found


def _build(model: EspeakModel, context: "ModelContext") -> "ModelEngine":
    # Imported here: only a process that serves models needs these.
    from runner_svc.runtimes.espeak_ng.backend import EspeakBackend  # noqa: PLC0415
    from runner_svc.runtimes.speech_server import speech_engine  # noqa: PLC0415

    return speech_engine(model, context, lambda: EspeakBackend(model, context))


RUNTIME = Runtime(
    name="espeak_ng",
    summary="espeak-ng, the speech synthesizer of Debian",
    docs="docs/media.md",
    settings=EspeakModel,
    build=_build,
    parameters=PARAMETERS,
    requirement=Requirement(name=PROGRAM, find=_find, remedy=REMEDY),
    environment=ENVIRONMENT,
    needs_environment=False,
    advice={
        "operations": "it speaks, and nothing else",
        "path": "its voices come with the program, see `espeak-ng --voices`",
    },
)
