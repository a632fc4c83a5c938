"""The request parameters that CTranslate2 takes."""

from runner_svc.policy.parameters import (
    MAX_TEMPLATE_ARGUMENT_CHARS,
    TEMPLATE_ARGUMENTS,
    Document,
    EngineParameters,
    Number,
)

MAX_BEAMS = 16
PARAMETERS = EngineParameters(
    engine="CTranslate2",
    # The arguments of generate_batch in version 4.8.
    allowed={
        "beam_size": Number(1, MAX_BEAMS, whole=True),
        "length_penalty": Number(-10, 10),
        "patience": Number(0.1, 10),
        "no_repeat_ngram_size": Number(0, 64, whole=True),
        "repetition_penalty": Number(0.01, 10),
        TEMPLATE_ARGUMENTS: Document(MAX_TEMPLATE_ARGUMENT_CHARS),
    },
    # Its generators have one seed for all requests.
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
"""Parameters that a beam search leaves out: it takes the most probable answers."""
