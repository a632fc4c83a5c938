"""Compaction: a summary, written by the conversation's own model, replaces the conversation. Pure.

The request for it keeps all messages and tools, so that the engine reads them from its prefix cache.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from gateway.sealed_texts import SealedTexts, unreadable
from weft.api.common.v1 import chat_pb2
from weft.dispatch.history import SUMMARY_HEAD, SYSTEM_ROLES, left_out_note
from weft.dispatch.payload_description import estimated_prompt_tokens
from weft.kernel.errors.error_tree import WeftError
from weft.kernel.errors.reasons import Reason
from weft.kernel.requests.request_values import CHARS_PER_TOKEN
from weft.kernel.values.fast_dataclass import fast_dataclass

_ASK = (
    "The context of this conversation is nearly full. Write a summary that replaces it: you will continue from the "
    "summary alone. State the user's goals and instructions, with exact wording where it matters; what was decided "
    "and why; what was done, with names, paths, commands and results; what failed; the current state; and the next "
    "steps. Call no tools and do not continue the work: answer with the summary only."
)
_EARLIER = "Include what came before the messages above, of which there is only this summary:\n\n"
_CUT = "\n[The summary was cut off here.]"
_LAST_WORDS = "\n\n[The last message of the user before it:]\n\n"
_GO_ON = "\n\n[You were in the middle of a turn. Continue it.]"
_COMPACTED = "the conversation was compacted"
_SHORTENED = "\n[... shortened ...]\n"
_MESSAGE_TOKENS = 8
"""Tokens of a message besides its text."""
_MIN_PART_TOKENS = 128
"""Room for a message below which no part of a conversation is summarized."""
MAX_LAST_WORDS_CHARS = 40_000
# Fields of a request that concern only its answer.
_OF_THE_ANSWER = ("tool_choice", "parallel_tool_calls", "response_format", "choice_count", "logprobs", "top_logprobs")


class Summary(msgspec.Struct, frozen=True):
    """The summary of a conversation, as the client keeps it encrypted."""

    text: str
    """The message for the model."""
    whole: bool = False
    """Whether it also stands for the user's messages before it."""


def summary_request(
    chat: chat_pb2.ChatPayload, instructions: str = "", earlier: str = "", *, replaces: bool = False
) -> chat_pb2.ChatPayload:
    """Returns the request for a summary of a chat.

    `instructions`: the caller's, after weft's own or, with `replaces`, in their place; `earlier`: the summary of what
    came before this part.
    """
    asked = chat_pb2.ChatPayload()
    asked.CopyFrom(chat)
    for name in _OF_THE_ANSWER:
        asked.ClearField(name)  # type: ignore[arg-type]  # its own fields
    asked.sampling.ClearField("max_tokens")
    asked.sampling.ClearField("stop")
    if asked.tools:
        asked.tool_choice.mode = chat_pb2.ToolChoice.MODE_NONE
    text = "\n\n".join(
        filter(None, ("" if replaces else _ASK, instructions, f"{_EARLIER}{earlier}" if earlier else ""))
    )
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
    return SUMMARY_HEAD + text + (_CUT if is_cut else "")


@fast_dataclass(kw_only=True)
class CompactionPlan:
    """When a conversation is compacted before it is answered."""

    threshold: int | None = None
    """Prompt tokens above which it is; None: only if the prompt does not fit the context of its model."""
    instructions: str = ""
    """The caller's, for the summary."""
    replaces: bool = False
    """Whether they are used in place of weft's own."""
    pauses: bool = False
    """Whether the summary is the whole answer."""

    def is_due(self, chat: chat_pb2.ChatPayload, tokens: int) -> bool:
        """Whether a chat of this many tokens is compacted: if messages, not only tools, make it too long."""
        if self.threshold is None or tokens <= self.threshold:
            return False
        estimated = max(1, estimated_prompt_tokens(chat))
        fixed = estimated_prompt_tokens(compacted(chat, "")) * tokens / estimated
        return tokens - fixed > self.threshold / 4


def compacted(chat: chat_pb2.ChatPayload, text: str) -> chat_pb2.ChatPayload:
    """Returns the chat with a summary in place of its messages; system messages remain."""
    short = chat_pb2.ChatPayload()
    short.CopyFrom(chat)
    del short.messages[:]
    short.messages.extend(each for each in chat.messages if each.role in SYSTEM_ROLES)
    short.messages.add(role=chat_pb2.ROLE_USER).content.add(text=text)
    return short


def whole_text(summary: str, chat: chat_pb2.ChatPayload, most_tokens: int) -> str:
    """Returns a summary with the user's last message, for clients that drop everything before it.

    `most_tokens`: of the prompt; the message is shortened to a quarter of that.
    """
    last = next((each for each in reversed(chat.messages) if each.role == chat_pb2.ROLE_USER), chat_pb2.ChatMessage())
    parts = [part.text if part.HasField("text") else left_out_note("a file", _COMPACTED) for part in last.content]
    # A quarter of the tokens has about as many characters as the whole has tokens.
    said = _shortened("\n".join(parts), min(most_tokens, MAX_LAST_WORDS_CHARS))
    is_within = bool(chat.messages) and chat.messages[-1].role == chat_pb2.ROLE_TOOL
    return summary + (_LAST_WORDS + said if said else "") + (_GO_ON if is_within else "")


def in_parts(chat: chat_pb2.ChatPayload, most_tokens: int, most_parts: int) -> Sequence[chat_pb2.ChatPayload]:
    """Returns chats that together have all messages, each of at most this many estimated tokens, to summarize in turn.

    Each has the tools and system messages, with room for a summary of the parts before it, half as long as its
    messages. A long message continues in the next part, or is shortened where there would be more than `most_parts`.
    Empty if there is no room.
    """
    head = compacted(chat, "")
    room = int((most_tokens - estimated_prompt_tokens(summary_request(head))) / 1.5)
    if room < _MIN_PART_TOKENS:
        return ()
    del head.messages[-1]
    messages = [message for message in chat.messages if message.role not in SYSTEM_ROLES]
    parts = _filled(head, [piece for message in messages for piece in _pieces(message, room)], room)
    if len(parts) > most_parts:
        parts = _filled(head, [_pieces(message, room, shorten=True)[0] for message in messages], room)
    return parts if len(parts) <= most_parts else ()


def _filled(
    head: chat_pb2.ChatPayload, messages: Sequence[chat_pb2.ChatMessage], room: int
) -> Sequence[chat_pb2.ChatPayload]:
    found, left = list[chat_pb2.ChatPayload](), 0
    for message in messages:
        size = _tokens(message)
        if size > left:
            found.append(chat_pb2.ChatPayload())
            found[-1].CopyFrom(head)
            left = room
        left -= size
        added = found[-1].messages.add()
        added.CopyFrom(message)
        if left == room - size and added.role == chat_pb2.ROLE_TOOL:
            # Its call is in the part before.
            added.role, added.tool_call_id = chat_pb2.ROLE_USER, ""
    return found


def _pieces(
    message: chat_pb2.ChatMessage, most_tokens: int, *, shorten: bool = False
) -> Sequence[chat_pb2.ChatMessage]:
    """Returns a message, or its texts over several messages if it is long; `shorten`: as one, shortened."""
    if _tokens(message) <= most_tokens:
        return [message]
    most_chars = int((most_tokens - _MESSAGE_TOKENS) * CHARS_PER_TOKEN)
    called = [f"[{call.name} was called with {call.arguments_text}]" for call in message.tool_calls]
    said = [part.text if part.HasField("text") else left_out_note("a file", _COMPACTED) for part in message.content]
    text = "\n".join([*said, *called])
    if shorten:
        text = _shortened(text, most_chars)
    role = chat_pb2.ROLE_USER if message.role == chat_pb2.ROLE_TOOL else message.role
    return [
        chat_pb2.ChatMessage(role=role, content=[chat_pb2.ContentPart(text=text[start : start + most_chars])])
        for start in range(0, max(1, len(text)), most_chars)
    ]


def _shortened(text: str, most_chars: int) -> str:
    half = most_chars // 2
    return text if len(text) <= most_chars else text[:half] + _SHORTENED + text[len(text) - half :]


def _tokens(message: chat_pb2.ChatMessage) -> int:
    return estimated_prompt_tokens(chat_pb2.ChatPayload(messages=[message])) + 1


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
