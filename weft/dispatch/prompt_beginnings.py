"""Detects prompts that change near their beginning within a session, which defeats prefix caches.

Stores digests of tools and of increasingly long beginnings of the system prompt, but no text. Pure.
"""

import hashlib
from collections import OrderedDict
from dataclasses import dataclass, field
from itertools import takewhile
from operator import eq

from weft.api.common.v1 import chat_pb2, receipt_pb2
from weft.dispatch.history import SYSTEM_ROLES
from weft.dispatch.payload_description import steady_text

BLOCK_ENDS = (*range(16, 1_025, 16), *range(1_088, 8_193, 64))
"""Lengths in characters of the compared system prompt beginnings; the rest is not compared."""
MAX_SESSIONS = 1_024
"""Maximum number of sessions; the least recently used is dropped first."""
MAX_BEGINNINGS = 4
"""Beginnings per session: agents also send other prompts, such as one for a title."""
MIN_SAME_CHARS = 32
"""System prompts with a shorter common beginning count as different tasks, not as a change."""
_DIGEST_BYTES = 8


@dataclass(frozen=True, slots=True)
class _Beginning:
    whole: bytes
    """Digest of the tools and the system prompt."""
    blocks: tuple[bytes, ...]
    """Digests of the system prompt up to each block end within it, and of all of it."""


@dataclass(slots=True)
class _Session:
    beginnings: list[_Beginning] = field(default_factory=list)
    request_count: int = 0
    change_count: int = 0


class PromptBeginnings:
    """The beginnings of the prompts of sessions."""

    def __init__(self) -> None:
        self._sessions: OrderedDict[bytes, _Session] = OrderedDict()

    def __len__(self) -> int:
        return len(self._sessions)

    def note(self, key: bytes, session: str, chat: chat_pb2.ChatPayload) -> receipt_pb2.PromptChange | None:
        """Returns what changed in a prompt since the earlier ones of its session; None: nothing.

        `key`: the digest of the session, salted with the tenant.
        """
        known = self._sessions.setdefault(key, _Session())
        self._sessions.move_to_end(key)
        if len(self._sessions) > MAX_SESSIONS:
            self._sessions.popitem(last=False)
        known.request_count += 1
        text = _system_prompt(chat)[: BLOCK_ENDS[-1]]
        tools = "".join(f"{tool.function.name}\0{tool.function.description}\0" for tool in chat.tools)
        whole = _digest(tools, _digest(text))
        if any(each.whole == whole for each in known.beginnings):
            return None
        blocks = _blocks(text)
        same, in_tools = 0, False
        for each in known.beginnings:
            same = max(same, sum(takewhile(bool, map(eq, each.blocks, blocks))))
            in_tools = in_tools or each.blocks == blocks
        known.beginnings = [*known.beginnings[1 - MAX_BEGINNINGS :], _Beginning(whole, blocks)]
        if not in_tools and (not same or BLOCK_ENDS[same - 1] < MIN_SAME_CHARS):
            return None
        known.change_count += 1
        change = receipt_pb2.PromptChange(session=session, in_tools=in_tools)
        change.change_count, change.request_count = known.change_count, known.request_count
        if not in_tools:
            change.same_character_count, change.end_character = BLOCK_ENDS[same - 1], BLOCK_ENDS[same]
        return change


def _system_prompt(chat: chat_pb2.ChatPayload) -> str:
    """Returns the text of the leading system messages of a chat, as engines get it."""
    texts: list[str] = []
    for message in chat.messages:
        if message.role not in SYSTEM_ROLES:
            break
        texts += [steady_text(part.text)[0] for part in message.content]
    return "\n".join(texts)


def _blocks(text: str) -> tuple[bytes, ...]:
    ends = [end for end in BLOCK_ENDS if end < len(text)] + ([len(text)] if text else [])
    digest, start, found = b"", 0, list[bytes]()
    for end in ends:
        digest = _digest(text[start:end], digest)
        found.append(digest)
        start = end
    return tuple(found)


def _digest(text: str, before: bytes = b"") -> bytes:
    return hashlib.blake2b(before + text.encode("utf-8", "surrogatepass"), digest_size=_DIGEST_BYTES).digest()
