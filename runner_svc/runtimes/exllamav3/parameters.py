"""The request parameters that ExLlamaV3 takes."""

from runner_svc.policy.parameters import (
    LOOK_BACK,
    MAX_INT,
    MAX_TEMPLATE_ARGUMENT_CHARS,
    TEMPLATE_ARGUMENTS,
    Document,
    EngineParameters,
    Flag,
    Grammar,
    Number,
    Texts,
)

PARAMETERS = EngineParameters(
    engine="ExLlamaV3",
    # The arguments of ComboSampler and Job in version 1.6.5.
    allowed={
        "adaptive_decay": Number(0, 0.99),
        "adaptive_target": Number(0, 1),
        "banned_strings": Texts(64, 256),
        "dry_allowed_length": LOOK_BACK,
        "dry_base": Number(1, 10),
        "dry_multiplier": Number(0, 100),
        "dry_range": LOOK_BACK,
        "grammar": Grammar(),
        "min_new_tokens": Number(0, MAX_INT, whole=True),
        "rep_decay_range": LOOK_BACK,
        "rep_sustain_range": LOOK_BACK,
        "temp_last": Flag(),
        "token_healing": Flag(),
        TEMPLATE_ARGUMENTS: Document(MAX_TEMPLATE_ARGUMENT_CHARS),
    },
    untaken=frozenset({"parallel_tool_calls", "reasoning_effort"}),
    renamed={"repeat_penalty": "rep_p", "frequency_penalty": "freq_p", "presence_penalty": "pres_p"},
    thinks_by_template=True,
)
