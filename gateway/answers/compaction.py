"""Compaction: a summary, written by the conversation's own model, replaces the conversation. Pure.

The request for it keeps all messages and tools, so that the engine reads them from its prefix cache.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from gateway.sealed_texts import SealedTexts, unreadable
from weft.api.common.v1 import chat_pb2
from weft.kernel.errors.error_tree import WeftError
from weft.kernel.errors.reasons import Reason

_ASK = (
    "The context of this conversation is nearly full. Write a summary that replaces it: you will continue from the "
    "summary alone. State the user's goals and instructions, with exact wording where it matters; what was decided "
    "and why; what was done, with names, paths, commands and results; what failed; the current state; and the next "
    "steps. Call no tools and do not continue the work: answer with the summary only."
)
_HEAD = "[The conversation up to here was replaced by this summary of it, which you wrote.]\n\n"
_CUT = "\n[The summary was cut off here.]"
# Fields of a request that concern only its answer.
_OF_THE_ANSWER = ("tool_choice", "parallel_tool_calls", "response_format", "choice_count", "logprobs", "top_logprobs")


class Summary(msgspec.Struct, frozen=True):
    """A summary as it is sealed for the client."""

    text: str
    """The message for the model."""
    whole: bool = False
    """Whether it also stands for the user's messages before it."""


def summary_request(chat: chat_pb2.ChatPayload, instructions: str = "") -> chat_pb2.ChatPayload:
    """Returns the request for a summary of a chat. `instructions`: the caller's, after weft's own."""
    asked = chat_pb2.ChatPayload()
    asked.CopyFrom(chat)
    for name in _OF_THE_ANSWER:
        asked.ClearField(name)  # type: ignore[arg-type]  # its own fields
    asked.sampling.ClearField("max_tokens")
    asked.sampling.ClearField("stop")
    if asked.tools:
        asked.tool_choice.mode = chat_pb2.ToolChoice.MODE_NONE
    text = f"{_ASK}\n\n{instructions}" if instructions else _ASK
    asked.messages.add(role=chat_pb2.ROLE_USER).content.add(text=text)
    return asked


def summary_text(pieces: Sequence[str], *, is_cut: bool) -> str:
    """Returns the message that replaces the conversation; `is_cut`: the answer reached a token limit.

    Raises BACKEND_PROTOCOL_ERROR if the model wrote no text.
    """
    text = "".join(pieces).strip()
    if not text:
        raise WeftError(
            Reason.BACKEND_PROTOCOL_ERROR, "the model wrote no summary, so nothing was compacted; try again"
        )
    return _HEAD + text + (_CUT if is_cut else "")


def seal_of(texts: SealedTexts | None, tenant: str) -> "SummarySeal | None":
    """Returns the seal of a tenant; None: this gateway compacts nothing."""
    return None if texts is None else SummarySeal(texts, tenant)


@dataclass(frozen=True, slots=True)
class SummarySeal:
    """Seals and opens the summaries of one tenant."""

    texts: SealedTexts
    tenant: str

    def seal(self, summary: Summary) -> str:
        """Returns the summary as clients keep it."""
        return self.texts.seal(self.tenant, msgspec.json.encode(summary).decode())

    def open(self, sealed: object, field: str) -> Summary:
        """Returns a summary that a client sends back. Raises INVALID_ARGUMENT naming `field`."""
        try:
            return msgspec.json.decode(self.texts.open(self.tenant, sealed, field), type=Summary)
        except msgspec.MsgspecError:
            raise unreadable(field) from None
