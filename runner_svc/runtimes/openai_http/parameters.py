"""The request parameters that an OpenAI-compatible server of unknown make takes."""

from runner_svc.policy.parameters import (
    MAX_INT,
    MAX_TEMPLATE_ARGUMENT_CHARS,
    MIROSTAT,
    TEMPLATE_ARGUMENTS,
    Document,
    EngineParameters,
    Flag,
    Number,
    OneOf,
    TokenIds,
)

PARAMETERS = EngineParameters(
    engine="an attached server",
    # What several servers understand under one name, and what cannot do harm on any of them.
    allowed={
        TEMPLATE_ARGUMENTS: Document(MAX_TEMPLATE_ARGUMENT_CHARS),
        "ignore_eos": Flag(),
        "min_tokens": Number(0, MAX_INT, whole=True),
        "mirostat": Number(0, 2, whole=True),
        **MIROSTAT,
        "repetition_penalty": Number(0, 2),
        "stop_token_ids": TokenIds(64),
        "typical_p": Number(0, 1),
        "verbosity": OneOf(("low", "medium", "high")),
    },
)
