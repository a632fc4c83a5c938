"""The runtime piper: voices in ONNX, spoken by the library in a child process (docs/decisions/0011)."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, ClassVar

from annotated_types import Ge, Le, MaxLen

from runner_svc.policy.parameters import EngineParameters
from runner_svc.runtimes.runtime import Runtime, deferred
from runner_svc.runtimes.runtime_settings import MediaModelSettings
from weft.kernel.settings.setting_annotations import PUBLIC, PathText
from weft_extensions.engines.speech_settings import SPEECH_ENVIRONMENT, SpeechSettings, VoiceName

PARAMETERS = EngineParameters(engine="piper")


MAX_NAMED_VOICES = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class PiperModel(SpeechSettings, MediaModelSettings):
    """Voices of piper: files `NAME.onnx`, each with its `NAME.onnx.json` beside it."""

    path: Annotated[PathText, PUBLIC] | None = None
    """Folder of voices, including its subfolders, or one `.onnx` file; `~` is your home folder. Required without
    `voices` and `source`."""
    voices: Annotated[Mapping[VoiceName, PathText], MaxLen(MAX_NAMED_VOICES), PUBLIC] = field(default_factory=dict)
    """Voice files by the name that requests use, such as `amy: ~/voices/en_US-amy-medium.onnx`."""
    slots: Annotated[int, Ge(1), Le(1024), PUBLIC] = 1
    """Maximum number of concurrent requests, each with `threads` processor threads."""

    other_files_settings: ClassVar[tuple[str, ...]] = ("voices",)


RUNTIME = Runtime(
    name="piper",
    summary="voices of piper, in a process that weft starts",
    docs="docs/media.md",
    settings=PiperModel,
    build=deferred("weft_extensions.engines.piper.piper_backend:build"),
    parameters=PARAMETERS,
    environment=SPEECH_ENVIRONMENT,
    advice={"operations": "it only supports speech"},
)
