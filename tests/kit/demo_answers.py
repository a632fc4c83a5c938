"""Requests to the demo model that leave nothing about the length of an answer, or about its words, to chance."""

import copy
from collections.abc import Mapping
from typing import Any

from weft.api.common.v1 import chat_pb2, sampling_pb2
from weft.dispatch.frames import GenerationPayload
from weft_app.compose.demo import demo_runner_document

END_TOKENS = (0, 2, 4, 5)
"""What llama.cpp takes for an end in the vocabulary of SmolLM2: <|endoftext|>, <|im_end|>, <reponame>, <file_sep>."""
FORBIDDEN = -100.0
WITHOUT_END: Mapping[str, Any] = {"logit_bias": {str(token): FORBIDDEN for token in END_TOKENS}}
"""Parameters of a request over HTTP, of an agent or of a model: an answer goes on until its limit of tokens."""

CERTAIN_ANSWER = "The capital of France is Paris."
_CAPITALS = (("Italy", "Rome"), ("Spain", "Madrid"))


def certain_chat(max_tokens: int = 40) -> chat_pb2.ChatPayload:
    """Returns a greedy chat whose answer is CERTAIN_ANSWER on every processor, quantised or not.

    With its two examples each token of the answer is at least 4 logits above the next one (transformers, float32 and
    bfloat16). Without them the first is 0.1 above: whether it is "The" or "L" depends on the kernels that a library
    chooses for the processor.
    """

    def said(role: chat_pb2.Role.ValueType, text: str) -> chat_pb2.ChatMessage:
        return chat_pb2.ChatMessage(role=role, content=[chat_pb2.ContentPart(text=text)])

    messages = list[chat_pb2.ChatMessage]()
    for country, capital in _CAPITALS:
        messages.append(said(chat_pb2.ROLE_USER, f"What is the capital of {country}?"))
        messages.append(said(chat_pb2.ROLE_ASSISTANT, f"The capital of {country} is {capital}."))
    messages.append(said(chat_pb2.ROLE_USER, "What is the capital of France?"))
    sampling = sampling_pb2.SamplingParams(max_tokens=max_tokens, temperature=0.0)
    return chat_pb2.ChatPayload(messages=messages, sampling=sampling)


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
