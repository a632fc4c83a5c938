"""The environment of CTranslate2, with the tokenizer that its models need."""

from pathlib import Path

from runner_svc.environments.environment import EngineEnvironment, EnvironmentVariant, Variant

ENVIRONMENT = EngineEnvironment(
    folder=Path(__file__).parent,
    summary="CTranslate2 4.8.5",
    variants={
        Variant.CPU: EnvironmentVariant(locks=("cpu.lock",), installed_bytes=275_000_000, download_bytes=71_000_000),
        Variant.CUDA: EnvironmentVariant(
            locks=("cuda.lock",), installed_bytes=1_400_000_000, download_bytes=723_000_000
        ),
    },
    check="import ctranslate2, tokenizers; ctranslate2.Generator",
    oldest_python=(3, 11),
    newest_python=(3, 13),
)
