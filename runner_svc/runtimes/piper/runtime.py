"""The runtime piper: voices in ONNX, spoken by the library in a child process (docs/decisions/0011)."""

from typing import TYPE_CHECKING

from runner_svc.environments.speech.environment import ENVIRONMENT
from runner_svc.runtimes.piper.parameters import PARAMETERS
from runner_svc.runtimes.piper.settings import PiperModel
from runner_svc.runtimes.runtime import Runtime

if TYPE_CHECKING:
    from runner_svc.runtimes.model_engine import ModelContext, ModelEngine


def _build(model: PiperModel, context: "ModelContext") -> "ModelEngine":
    # Imported here: only a process that serves models needs these.
    from runner_svc.runtimes.piper.backend import PiperBackend  # noqa: PLC0415
    from runner_svc.runtimes.speech_server import speech_engine  # noqa: PLC0415

    for name, path in model.voices.items():
        if not path.expanduser().is_file():
            raise context.refuse(f"voices.{name}", f"there is no file {path.expanduser()}")
    return speech_engine(model, context, lambda: PiperBackend(model, context))


RUNTIME = Runtime(
    name="piper",
    summary="voices of piper, in a process that weft starts",
    docs="docs/media.md",
    settings=PiperModel,
    build=_build,
    parameters=PARAMETERS,
    environment=ENVIRONMENT,
    advice={"operations": "it speaks, and nothing else"},
)
