"""The environment of diffusers: the library, PyTorch, and the text encoders' library."""

from pathlib import Path

from runner_svc.environments.environment import EngineEnvironment, EnvironmentVariant, Variant

ENVIRONMENT = EngineEnvironment(
    folder=Path(__file__).parent,
    summary="diffusers 0.42.1",
    variants={
        Variant.CPU: EnvironmentVariant(
            locks=("cpu-torch.lock", "cpu.lock"), installed_bytes=1_150_000_000, download_bytes=300_000_000
        ),
        Variant.CUDA: EnvironmentVariant(
            locks=("cuda.lock",), installed_bytes=5_500_000_000, download_bytes=2_700_000_000
        ),
    },
    check="import diffusers, PIL, torch, transformers; diffusers.StableDiffusionPipeline",
    oldest_python=(3, 11),
    newest_python=(3, 13),
)
