"""Settings of speech models, regardless of the engine."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, ClassVar

from annotated_types import MaxLen

from runner_svc.environments.environment import EngineEnvironment, EnvironmentVariant, Variant
from runner_svc.policy.voices import MAX_VOICE_CHARS
from runner_svc.runtimes.runtime_settings import StartedModelSettings
from weft.kernel.settings.setting_annotations import PUBLIC, Pattern
from weft.kernel.values.reach import PLAIN
from weft_extensions.engines.environments import FOLDER

SPEECH_ENVIRONMENT = EngineEnvironment(
    folder=FOLDER / "speech",
    summary="piper 1.8.0 and PyAV 18.1.0",
    variants={
        Variant.CPU: EnvironmentVariant(locks=("cpu.lock",), installed_bytes=315_000_000, download_bytes=115_000_000)
    },
    check="import av, piper; piper.PiperVoice; av.codec.Codec('libmp3lame', 'w')",
)
"""Text-to-speech environment: piper, and the audio encoders for all speech engines."""
VoiceName = Annotated[str, MaxLen(MAX_VOICE_CHARS), Pattern(r"^[^\x00-\x1f\x7f]+$"), PLAIN]
MAX_ALIASES = 256


# Without slots, because it is mixed into settings that have them.
@dataclass(frozen=True, kw_only=True)
class SpeechSettings(StartedModelSettings):
    """Adds the default voice and voice aliases."""

    tried_by: ClassVar[str] = 'weft media speak "Hello" -o hello.mp3'

    default_voice: Annotated[VoiceName, PUBLIC] | None = None
    """Voice for requests that set none, or one of OpenAI's such as `alloy`. Default: the engine's first voice."""
    voice_aliases: Annotated[Mapping[VoiceName, VoiceName], MaxLen(MAX_ALIASES), PUBLIC] = field(default_factory=dict)
    """Additional names of voices, such as `nova: en_US-amy-medium`."""
