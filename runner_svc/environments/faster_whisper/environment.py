"""The environment of faster-whisper, with what reads recordings and what finds the voices in them."""

from pathlib import Path

from runner_svc.environments.environment import EngineEnvironment, EnvironmentVariant, Variant

ENVIRONMENT = EngineEnvironment(
    folder=Path(__file__).parent,
    summary="faster-whisper 1.2.1",
    variants={
        Variant.CPU: EnvironmentVariant(locks=("cpu.lock",), installed_bytes=464_000_000, download_bytes=81_000_000),
        Variant.CUDA: EnvironmentVariant(
            locks=("cuda.lock",), installed_bytes=1_600_000_000, download_bytes=733_000_000
        ),
    },
    check="import av, ctranslate2, faster_whisper.vad, onnxruntime; faster_whisper.WhisperModel",
    oldest_python=(3, 11),
    newest_python=(3, 13),
)
