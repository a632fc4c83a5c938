"""Parameters of requests to the demo model that leave nothing about the length of an answer to chance."""

import copy
from collections.abc import Mapping
from typing import Any

from weft.api.common.v1 import sampling_pb2
from weft.dispatch.frames import GenerationPayload
from weft_app.compose.demo import demo_runner_document

END_TOKENS = (0, 2, 4, 5)
"""What llama.cpp takes for an end in the vocabulary of SmolLM2: <|endoftext|>, <|im_end|>, <reponame>, <file_sep>."""
FORBIDDEN = -100.0
WITHOUT_END: Mapping[str, Any] = {"logit_bias": {str(token): FORBIDDEN for token in END_TOKENS}}
"""Parameters of a request over HTTP, of an agent or of a model: an answer goes on until its limit of tokens."""


def sampling_without_end(**given: Any) -> sampling_pb2.SamplingParams:
    """Returns sampling parameters with which an answer goes on until its limit of tokens."""
    return sampling_pb2.SamplingParams(logit_bias=dict.fromkeys(END_TOKENS, FORBIDDEN), **given)


def without_end(payload: GenerationPayload) -> GenerationPayload:
    """Returns a request whose answer goes on until its limit of tokens."""
    endless = copy.deepcopy(payload)
    endless.sampling.logit_bias.update(dict.fromkeys(END_TOKENS, FORBIDDEN))
    return endless


def demo_runner_without_end(default_max_tokens: int) -> dict[str, Any]:
    """Returns the demo runner as a document, with a model that goes on until the limit of tokens of each request."""
    runner = demo_runner_document()
    runner["models"][0] |= {"default_params": dict(WITHOUT_END), "default_max_tokens": default_max_tokens}
    return runner
