"""The settings of a model of faster-whisper in `weft.yaml`."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, ClassVar, Literal

from annotated_types import Ge, Le
from typing_extensions import override

from runner_svc.runtimes.settings import MediaModelSettings
from weft.kernel.settings import PUBLIC, PathText

WEIGHTS_FILE = "model.bin"
MIB = 1024 * 1024
Device = Literal["cpu", "cuda", "auto"]
ComputeType = Literal[
    "default",
    "auto",
    "int8",
    "int8_float32",
    "int8_float16",
    "int8_bfloat16",
    "int16",
    "float16",
    "bfloat16",
    "float32",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class FasterWhisperModel(MediaModelSettings):
    """A Whisper model in the form of CTranslate2, such as the repository `Systran/faster-whisper-small`."""

    tried_by: ClassVar[str] = "weft transcribe talk.mp3"

    path: Annotated[PathText, PUBLIC] | None = None
    """The folder of the model, with `model.bin`, `config.json`, `tokenizer.json` and its vocabulary. Required without
    `source`."""
    slots: Annotated[int, Ge(1), Le(64), PUBLIC] = 1
    """Recordings it works on at once, each in threads of its own."""
    device: Annotated[Device, PUBLIC] = "auto"
    """Where it computes; `auto` takes an accelerator if there is one."""
    compute_type: Annotated[ComputeType, PUBLIC] = "int8"
    """Type of the weights. One that the device does not have becomes the nearest that it has."""
    beam_size: Annotated[int, Ge(1), Le(16), PUBLIC] = 5
    """Beams of the search for the words; 1 is quicker and less exact."""
    voice_detection: Annotated[bool, PUBLIC] = False
    """Whether parts of a recording without a voice are left out before the model hears it, where a request does not say
    so (`voice_detection`)."""
    max_audio_seconds: Annotated[float, Ge(1), Le(604_800), PUBLIC] = 14_400.0
    """Longest recording. A longer one is refused at once by what its file says, else when its sound goes on."""
    max_audio_mb: Annotated[int, Ge(1), Le(65_536), PUBLIC] = 512
    """Largest file of a recording, in MiB. The gateway has a limit of its own for HTTP callers (`max_audio_bytes`)."""
    max_channels: Annotated[int, Ge(1), Le(64)] = 8
    """Most channels of a recording; they are mixed into one."""
    min_sample_rate_hz: Annotated[int, Ge(1_000), Le(16_000)] = 4_000
    """Lowest sample rate of a recording."""
    max_sample_rate_hz: Annotated[int, Ge(16_000), Le(768_000)] = 192_000
    """Highest sample rate of a recording."""
    sleeps_in_place: bool = False
    """Whether it hibernates, when idle, by unloading the weights in its process, which wakes in a moment. Default: its
    process is ended, as it always is where it holds memory of accelerators."""

    @override
    def weights_of(self, path: Path) -> Path:
        return path / WEIGHTS_FILE

    @property
    def max_audio_bytes(self) -> int:
        """Largest file of a recording."""
        return self.max_audio_mb * MIB
