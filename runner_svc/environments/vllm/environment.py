"""The environment of vLLM: the program `vllm`."""

from pathlib import Path

from runner_svc.environments.environment import EngineEnvironment, EnvironmentVariant, Variant

ENVIRONMENT = EngineEnvironment(
    folder=Path(__file__).parent,
    summary="vLLM 0.32.0",
    variants={
        Variant.CPU: EnvironmentVariant(
            locks=("cpu-torch.lock", "cpu.lock"),
            installed_bytes=3_300_000_000,
            download_bytes=900_000_000,
            # The program asks for its version under this name, and the build for processors has another.
            stubs=("vllm==0.32.0+cpu",),
        ),
        Variant.CUDA: EnvironmentVariant(
            locks=("cuda.lock",), installed_bytes=8_500_000_000, download_bytes=3_960_000_000
        ),
    },
    check="from vllm.entrypoints.cli import main",
    oldest_python=(3, 11),
    newest_python=(3, 13),
)
