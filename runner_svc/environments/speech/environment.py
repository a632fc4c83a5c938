"""The environment of text to speech: piper, and the encoders of recordings, which espeak-ng uses too."""

from pathlib import Path

from runner_svc.environments.environment import EngineEnvironment, EnvironmentVariant, Variant

ENVIRONMENT = EngineEnvironment(
    folder=Path(__file__).parent,
    summary="piper 1.8.0 and PyAV 18.1.0",
    variants={
        Variant.CPU: EnvironmentVariant(locks=("cpu.lock",), installed_bytes=315_000_000, download_bytes=115_000_000)
    },
    check="import av, piper; piper.PiperVoice; av.codec.Codec('libmp3lame', 'w')",
    oldest_python=(3, 11),
    newest_python=(3, 13),
)
