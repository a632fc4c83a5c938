"""The environment of ExLlamaV3, which compiles its kernels for CUDA when it is imported for the first time."""

from pathlib import Path

from runner_svc.environments.environment import EngineEnvironment, EnvironmentVariant, Variant

ENVIRONMENT = EngineEnvironment(
    folder=Path(__file__).parent,
    summary="ExLlamaV3 1.6.5",
    variants={
        Variant.CUDA: EnvironmentVariant(
            locks=("cuda.lock",), installed_bytes=5_720_000_000, download_bytes=2_700_000_000
        ),
    },
    check="import exllamav3",
    oldest_python=(3, 11),
    newest_python=(3, 13),
)
