"""Request parameters of each known server program; their sources are in `presets.py`."""

from runner_svc.policy.parameters import (
    LOOK_BACK,
    MAX_INT,
    MAX_TEMPLATE_ARGUMENT_CHARS,
    MIROSTAT,
    TEMPLATE_ARGUMENTS,
    Document,
    EngineParameters,
    Flag,
    Number,
    OneOf,
    Texts,
    TokenIds,
)

_TEMPLATE = {TEMPLATE_ARGUMENTS: Document(MAX_TEMPLATE_ARGUMENT_CHARS)}
_REPETITION = {"repetition_penalty": Number(0, 2)}
_RENAMED = {"repeat_penalty": "repetition_penalty"}

PARAMETERS = EngineParameters(
    engine="a server program",
    # As for external servers: parameters that several programs support under the same name.
    allowed={
        **_TEMPLATE,
        **_REPETITION,
        **MIROSTAT,
        "ignore_eos": Flag(),
        "min_tokens": Number(0, MAX_INT, whole=True),
        "mirostat": Number(0, 2, whole=True),
        "stop_token_ids": TokenIds(64),
        "typical_p": Number(0, 1),
        "verbosity": OneOf(("low", "medium", "high")),
    },
)

SGLANG = EngineParameters(
    engine="SGLang",
    allowed={
        **_TEMPLATE,
        **_REPETITION,
        "ignore_eos": Flag(),
        "min_tokens": Number(0, MAX_INT, whole=True),
        "no_stop_trim": Flag(),
        "separate_reasoning": Flag(),
        "skip_special_tokens": Flag(),
        "stop_token_ids": TokenIds(64),
        "stream_reasoning": Flag(),
    },
    renamed=_RENAMED,
)

TGI = EngineParameters(
    engine="Text Generation Inference",
    untaken=frozenset(
        {
            *("logit_bias", "min_p", "n", "parallel_tool_calls", "reasoning_effort", "repeat_penalty"),
            *("response_format", "top_k"),
        }
    ),
)

LMDEPLOY = EngineParameters(
    engine="LMDeploy",
    allowed={
        **_TEMPLATE,
        **_REPETITION,
        "ignore_eos": Flag(),
        "include_stop_str_in_output": Flag(),
        "min_new_tokens": Number(0, MAX_INT, whole=True),
        "repetition_ngram_size": Number(0, MAX_INT, whole=True),
        "repetition_ngram_threshold": Number(0, MAX_INT, whole=True),
        "skip_special_tokens": Flag(),
        "spaces_between_special_tokens": Flag(),
    },
    renamed=_RENAMED,
)

TABBYAPI = EngineParameters(
    engine="TabbyAPI",
    allowed={
        **_TEMPLATE,
        "repetition_penalty": Number(0.01, 2),
        "banned_strings": Texts(64, 256),
        "cfg_scale": Number(0, 100),
        "dry_allowed_length": Number(0, 1024, whole=True),
        "dry_base": Number(0, 100),
        "dry_multiplier": Number(0, 100),
        "dry_range": LOOK_BACK,
        "ignore_eos": Flag(),
        "min_tokens": Number(0, MAX_INT, whole=True),
        "penalty_range": Number(-1, MAX_INT, whole=True),
        "skip_special_tokens": Flag(),
        "smoothing_factor": Number(0, 100),
        "temperature_last": Flag(),
        "tfs": Number(0, 1),
        "top_a": Number(0, 1),
        "typical_p": Number(0.01, 1),
        "verbosity": OneOf(("low", "medium", "high")),
    },
    renamed=_RENAMED,
)

MLX_LM = EngineParameters(
    engine="mlx-lm",
    allowed={
        **_TEMPLATE,
        **_REPETITION,
        "frequency_context_size": LOOK_BACK,
        "num_draft_tokens": Number(0, 64, whole=True),
        "presence_context_size": LOOK_BACK,
        "repetition_context_size": LOOK_BACK,
        "xtc_probability": Number(0, 1),
        "xtc_threshold": Number(0, 1),
    },
    renamed=_RENAMED,
    untaken=frozenset({"n", "parallel_tool_calls", "reasoning_effort", "response_format", "tool_choice"}),
    thinks_by_template=True,
)

OLLAMA = EngineParameters(
    engine="Ollama",
    untaken=frozenset(
        {
            *("logit_bias", "logprobs", "min_p", "n", "parallel_tool_calls", "repeat_penalty", "tool_choice"),
            *("top_k", "top_logprobs"),
        }
    ),
)
