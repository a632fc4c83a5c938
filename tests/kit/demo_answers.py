"""Requests to the demo model with a predictable length or text of the answer."""

import copy
from collections.abc import Mapping
from typing import Any

from weft.api.common.v1 import chat_pb2, sampling_pb2
from weft.dispatch.frames import GenerationPayload
from weft_app.compose.demo import demo_runner_document

END_TOKENS = (0, 2, 4, 5)
"""llama.cpp's end tokens in SmolLM2's vocabulary: <|endoftext|>, <|im_end|>, <reponame>, <file_sep>."""
FORBIDDEN = -100.0
WITHOUT_END: Mapping[str, Any] = {"logit_bias": {str(token): FORBIDDEN for token in END_TOKENS}}
"""Parameters (of an HTTP request, agent or model) that make answers continue until their token limit."""

CERTAIN_ANSWER = "The capital of France is Paris."
_CAPITALS = (("Italy", "Rome"), ("Spain", "Madrid"))


def certain_chat(max_tokens: int = 40) -> chat_pb2.ChatPayload:
    """Returns a greedy chat with the answer CERTAIN_ANSWER on every processor, quantized or not.

    Its two examples put each token of the answer at least 4 logits above the next one (transformers, float32 and
    bfloat16). Without them the first is 0.1 above, so the kernels that a library selects for the processor decide
    between "The" and "L".
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
    """Returns sampling parameters that make an answer continue until its token limit."""
    return sampling_pb2.SamplingParams(logit_bias=dict.fromkeys(END_TOKENS, FORBIDDEN), **given)


def without_end(payload: GenerationPayload) -> GenerationPayload:
    """Returns a request with an answer that continues until its token limit."""
    endless = copy.deepcopy(payload)
    endless.sampling.logit_bias.update(dict.fromkeys(END_TOKENS, FORBIDDEN))
    return endless


def demo_runner_without_end(default_max_tokens: int) -> dict[str, Any]:
    """Returns the demo runner's document with a model that always answers until the token limit."""
    runner = demo_runner_document()
    runner["models"][0] |= {"default_params": dict(WITHOUT_END), "default_max_tokens": default_max_tokens}
    return runner
