"""The runtime ctranslate2: the library in its own child process, one per model (docs/decisions/0011)."""

from dataclasses import dataclass
from typing import Annotated

from annotated_types import Ge, Le

from runner_svc.environments.environment import EngineEnvironment, EnvironmentVariant, Variant
from runner_svc.policy.engine_choice import WeightFormat
from runner_svc.policy.engine_variables import DEVICE_VARIABLES
from runner_svc.policy.model_sizing import EngineLocations
from runner_svc.policy.parameters import (
    MAX_TEMPLATE_ARGUMENT_CHARS,
    TEMPLATE_ARGUMENTS,
    Document,
    EngineParameters,
    Number,
)
from runner_svc.runtimes.runtime import Runtime, deferred
from runner_svc.runtimes.runtime_settings import Argument, CTranslate2Settings, FileModelSettings
from weft.kernel.settings.setting_annotations import PUBLIC
from weft_extensions.engines.environments import FOLDER

MAX_BEAMS = 16
ENVIRONMENT = EngineEnvironment(
    folder=FOLDER / "ctranslate2",
    summary="CTranslate2 4.8.5",
    variants={
        Variant.CPU: EnvironmentVariant(locks=("cpu.lock",), installed_bytes=275_000_000, download_bytes=71_000_000),
        Variant.CUDA: EnvironmentVariant(
            locks=("cuda.lock",), installed_bytes=1_400_000_000, download_bytes=723_000_000
        ),
    },
    check="import ctranslate2, tokenizers; ctranslate2.Generator",
)


PARAMETERS = EngineParameters(
    engine="CTranslate2",
    # Arguments of generate_batch in version 4.8.
    allowed={
        "beam_size": Number(1, MAX_BEAMS, whole=True),
        "length_penalty": Number(-10, 10),
        "patience": Number(0.1, 10),
        "no_repeat_ngram_size": Number(0, 64, whole=True),
        "repetition_penalty": Number(0.01, 10),
        TEMPLATE_ARGUMENTS: Document(MAX_TEMPLATE_ARGUMENT_CHARS),
    },
    # All requests share the library's random seed.
    untaken=frozenset(
        {
            *("min_p", "seed", "presence_penalty", "frequency_penalty", "logit_bias"),
            *("parallel_tool_calls", "reasoning_effort"),
        }
    ),
    renamed={"repeat_penalty": "repetition_penalty"},
    thinks_by_template=True,
)
BEAM_SIZE = "beam_size"
UNUSED_BY_BEAMS = ("temperature", "top_k", "top_p")
"""Parameters without effect in a beam search, which returns the most probable answers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CTranslate2Model(FileModelSettings, CTranslate2Settings):
    """A model that CTranslate2 generates with, converted by `ct2-transformers-converter`."""

    slots: Annotated[int, Ge(1), Le(1024)] = 1
    """Maximum number of concurrent requests, each in its own threads. Prompt prefixes are reused only with 1."""
    beam_size: Annotated[int, Ge(1), Le(16), Argument("--beam-size"), PUBLIC] = 1
    """Default number of beams if a request does not set `beam_size`. With more than 1, answers are not streamed token
    by token, as a beam search has no text until it ends; they get a warning."""


RUNTIME = Runtime(
    name="ctranslate2",
    summary="CTranslate2 in a process that weft starts",
    docs="docs/engines.md",
    settings=CTranslate2Model,
    build=deferred("weft_extensions.engines.ctranslate2.ctranslate2_backend:build"),
    formats=frozenset({WeightFormat.CTRANSLATE2}),
    locations=EngineLocations(in_layers=False),
    parameters=PARAMETERS,
    variables=(*DEVICE_VARIABLES, "CT2_*"),
    load_values=lambda model: model.device_values,
    environment=ENVIRONMENT,
    advice={
        "operations": "the library's operations are fixed",
        "embeddings": "CTranslate2 has no embeddings for text generation models",
    },
)
