"""The request parameters that vLLM takes."""

from runner_svc.policy.parameters import (
    MAX_INT,
    MAX_TEMPLATE_ARGUMENT_CHARS,
    TEMPLATE_ARGUMENTS,
    Document,
    EngineParameters,
    Flag,
    Grammar,
    Number,
    StructuredOutputs,
    Texts,
    TokenIds,
)

PARAMETERS = EngineParameters(
    engine="vLLM",
    # Names and meanings: vLLM's chat and completion protocols; bounds are ours where it has none.
    allowed={
        "allowed_token_ids": TokenIds(1024),
        "bad_words": Texts(64, 256),
        TEMPLATE_ARGUMENTS: Document(MAX_TEMPLATE_ARGUMENT_CHARS),
        "grammar": Grammar(),
        "ignore_eos": Flag(),
        "include_stop_str_in_output": Flag(),
        "length_penalty": Number(-10, 10),
        "min_tokens": Number(0, MAX_INT, whole=True),
        "repetition_penalty": Number(0.01, 2),
        "skip_special_tokens": Flag(),
        "spaces_between_special_tokens": Flag(),
        "stop_token_ids": TokenIds(64),
        "structured_outputs": StructuredOutputs(),
        "truncate_prompt_tokens": Number(-1, MAX_INT, whole=True),
    },
    renamed={"repeat_penalty": "repetition_penalty"},
    members={"grammar": "structured_outputs"},
    thinks_by_template=True,
)
