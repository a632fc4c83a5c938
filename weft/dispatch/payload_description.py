"""Describes a payload for the scheduler: size, required skills, and digests of its beginning.

The prompt itself stays with the dispatcher. Pure.
"""

import hashlib
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from weft.api.common.v1 import (
    agent_behaviour_pb2,
    audio_pb2,
    chat_pb2,
    completion_pb2,
    embedding_pb2,
    image_pb2,
    rerank_pb2,
    tokenize_pb2,
)
from weft.dispatch.history import SYSTEM_ROLES, media_skills, unread_media
from weft.dispatch.media_work import work_of
from weft.kernel.requests.capabilities import Capabilities, ThinkingMode, untaken_languages, untaken_words
from weft.kernel.requests.request_values import CHARS_PER_TOKEN, PREFIX_ENDS, Skill
from weft.kernel.values.fast_dataclass import fast_dataclass

TOKENS_PER_MESSAGE = 4
"""Tokens that chat templates add per message."""
TOKENS_PER_MEDIUM = 512
"""An average image in a vision model, or about 20 s of audio."""
MAX_DIGESTED_BYTES = 65_536
"""Bytes of a payload that its digest covers."""
_DIGEST_BYTES = 8
_KEY_BYTES = 16

GeneratingPayload = chat_pb2.ChatPayload | completion_pb2.CompletionPayload
WholePayload = (
    embedding_pb2.EmbeddingPayload
    | rerank_pb2.RerankPayload
    | tokenize_pb2.TokenizePayload
    | image_pb2.ImagePayload
    | audio_pb2.TranscriptionPayload
    | audio_pb2.SpeechPayload
)
"""Payloads whose answers have no generated tokens."""
Payload = GeneratingPayload | WholePayload

_NO_SKILLS: frozenset[Skill] = frozenset()


@fast_dataclass(kw_only=True)
class Description:
    """A payload as a scheduler sees it; see `port.PlacementRequest` for the fields."""

    prompt_tokens: int
    max_output_tokens: int | None
    work: float
    skills: frozenset[Skill]
    thinking: ThinkingMode
    tools: frozenset[str]
    prefix_digests: tuple[int, ...]
    prompt_digest: int


def describe(
    payload: Payload,
    *,
    salt: str,
    behaviour: agent_behaviour_pb2.AgentBehaviour | None = None,
    unread: Callable[[], frozenset[Skill]] = frozenset,
) -> Description:
    """Describes a payload. Equal prefixes with different salts (tenant and cache tag) have different digests.

    `unread` returns the skills that all its models lack: media in earlier turns that needs them reaches no engine.
    """
    prompt = _prompt_of(payload)
    skills = _NO_SKILLS
    # Most prompts have only text, so the parts need no second scan.
    if not prompt.is_text_alone:
        skills = needed_skills(payload)
        if isinstance(payload, chat_pb2.ChatPayload) and (earlier := media_skills(payload, earlier=True)):
            lacking = unread()
            skills |= earlier - lacking
            prompt = prompt._replace(media=prompt.media - unread_media(payload, lacking))
    return Description(
        prompt_tokens=_prompt_tokens(payload, prompt),
        max_output_tokens=_max_output_tokens(payload),
        work=work_of(payload),
        skills=skills,
        thinking=needed_thinking(payload),
        tools=frozenset(behaviour.tools) if behaviour is not None else frozenset(),
        prefix_digests=prefix_digests(prompt.pieces, salt),
        prompt_digest=prompt_digest(payload, salt),
    )


def cache_scope(tenant: str, cache_tag: str) -> str:
    """Returns the salt of prompts that may share a cache."""
    return f"{tenant}\0{cache_tag}"


def prompt_prefixes(payload: Payload, salt: str) -> tuple[tuple[int, ...], int]:
    """Returns the prefix digests of a single prompt and its characters; no digests if only a part of it is text."""
    prompt = _prompt_of(payload)
    is_single = not isinstance(payload, completion_pb2.CompletionPayload) or len(payload.prompts) == 1
    if prompt.media or not is_single:
        return (), 0
    return prefix_digests(prompt.pieces, salt), sum(map(len, prompt.pieces))


def affinity_key(session: str, salt: str) -> bytes:
    """Returns the key of a session; empty: no session. Sessions with different salts have different keys."""
    if not session:
        return b""
    return hashlib.blake2b(f"{salt}\0{session}".encode(), digest_size=_KEY_BYTES).digest()


def prefix_digests(pieces: Sequence[str], salt: str) -> tuple[int, ...]:
    """Returns digests of increasingly long prefixes, one per entry of PREFIX_ENDS that the text reaches."""
    if sum(map(len, pieces)) < PREFIX_ENDS[0]:
        return ()
    text = _beginning(pieces)
    digest = hashlib.blake2b(salt.encode(), digest_size=_DIGEST_BYTES).digest()
    found, start = [], 0
    for end in PREFIX_ENDS:
        if end > len(text):
            break
        chunk = text[start:end].encode("utf-8", "surrogatepass")
        digest = hashlib.blake2b(digest + chunk, digest_size=_DIGEST_BYTES).digest()
        found.append(int.from_bytes(digest, "big"))
        start = end
    return tuple(found)


def prompt_digest(payload: Payload, salt: str) -> int:
    """Returns a digest of a payload; of a long one, only its ends and length are included."""
    data = payload.SerializeToString(deterministic=True)
    if len(data) > MAX_DIGESTED_BYTES:
        half = MAX_DIGESTED_BYTES // 2
        data = b"%d" % len(data) + data[:half] + data[-half:]
    digest = hashlib.blake2b(salt.encode() + b"\0" + data, digest_size=_DIGEST_BYTES)
    return int.from_bytes(digest.digest(), "big")


def _beginning(pieces: Iterable[str]) -> str:
    taken: list[str] = []
    left = PREFIX_ENDS[-1]
    for piece in pieces:
        if left <= 0:
            break
        taken.append(piece[:left])
        left -= len(piece)
    return "".join(taken)


class _Prompt(NamedTuple):
    pieces: Sequence[str]
    """Its texts in order, with roles."""
    media: int = 0
    """Number of parts without text."""
    is_text_alone: bool = False
    """Whether it is a chat without media and tools."""


def _prompt_of(payload: Payload) -> _Prompt:
    match payload:
        case chat_pb2.ChatPayload():
            return _chat_prompt(payload)
        case completion_pb2.CompletionPayload():
            return _Prompt([prompt.text for prompt in payload.prompts])
        case embedding_pb2.EmbeddingPayload():
            return _Prompt([item.text for item in payload.inputs])
        case rerank_pb2.RerankPayload():
            # The query is paired with each document separately, so only the longest document counts.
            return _Prompt([payload.query, max(payload.documents, key=len, default="")])
        case _:
            # Tokenizing generates nothing; media work is measured differently.
            return _Prompt([])


def _chat_prompt(chat: chat_pb2.ChatPayload) -> _Prompt:
    """Returns the prompt of a chat in a single pass over its parts."""
    pieces = [_tool_text(tool.function) for tool in chat.tools] if chat.tools else []
    is_text_alone, media = not pieces, 0
    for message in chat.messages:
        pieces.append(f"\0{message.role}\0")
        is_system = message.role in SYSTEM_ROLES
        for part in message.content:
            if text := part.text:
                pieces.append(steady_text(text)[0] if is_system else text)
            elif part.WhichOneof("kind") != "text":
                media += 1
        if message.tool_calls:
            pieces += [call.arguments_text for call in message.tool_calls]
    return _Prompt(pieces, media, is_text_alone and not media)


def _tool_text(function: chat_pb2.FunctionTool) -> str:
    # The schema as a message is about as long as its JSON, which takes ten times as long to write.
    schema = function.parameters.SerializeToString().decode("latin-1")
    return f"{function.name}\0{function.description}\0{schema}"


def _prompt_tokens(payload: Payload, prompt: _Prompt) -> int:
    match payload:
        # Prompts are processed separately, so only the longest counts.
        case completion_pb2.CompletionPayload():
            return max(map(_input_tokens, payload.prompts), default=0)
        case embedding_pb2.EmbeddingPayload():
            return max(map(_input_tokens, payload.inputs), default=0)
    tokens = sum(map(len, prompt.pieces)) / CHARS_PER_TOKEN
    if isinstance(payload, chat_pb2.ChatPayload):
        tokens += TOKENS_PER_MESSAGE * len(payload.messages) + TOKENS_PER_MEDIUM * prompt.media
    return int(tokens)


def estimated_prompt_tokens(payload: Payload) -> int:
    """Estimates the tokens of a prompt that the engine has not counted yet."""
    return _prompt_tokens(payload, _prompt_of(payload))


def _input_tokens(given: completion_pb2.PromptInput) -> int:
    return len(given.tokens.ids) or int(len(given.text) / CHARS_PER_TOKEN)


def _max_output_tokens(payload: Payload) -> int | None:
    """Returns the total over all choices; None: not specified."""
    match payload:
        case chat_pb2.ChatPayload():
            choices = max(1, payload.choice_count)
        case completion_pb2.CompletionPayload():
            choices = max(1, payload.choice_count) * max(1, len(payload.prompts))
        case _:
            return 0
    if not payload.sampling.HasField("max_tokens"):
        return None
    return min(payload.sampling.max_tokens * choices, 2**31 - 1)


def needed_skills(payload: Payload) -> frozenset[Skill]:
    """Returns the skills beyond text that a model needs for a payload.

    Media in earlier turns needs no skill: a model without it gets notes instead (`weft.dispatch.history`).
    """
    if isinstance(payload, tokenize_pb2.TokenizePayload):
        payload = payload.chat
    if not isinstance(payload, chat_pb2.ChatPayload):
        return frozenset()
    found = media_skills(payload, earlier=False)
    if payload.tools and payload.tool_choice.mode != chat_pb2.ToolChoice.MODE_NONE:
        return found | {Skill.TOOLS}
    return found


_TEMPLATE_ARGUMENTS, _ENABLE_THINKING = "chat_template_kwargs", "enable_thinking"
_SOURCE, _TARGET = "source_lang_code", "target_lang_code"
_NO_LANGUAGES = frozenset({"auto", "mixed"})
"""Source languages to be detected."""


def untaken_words_of(payload: Payload, capabilities: Capabilities) -> str:
    """Returns which parts of a payload a model with these capabilities rejects, as text; empty: it accepts all."""
    lacking = needed_skills(payload) & capabilities.lacking if capabilities.lacking else _NO_SKILLS
    words = untaken_words(lacking, capabilities.thinking_modes, needed_thinking(payload))
    if words or not (capabilities.source_languages or capabilities.target_languages):
        return words
    source, target = _languages_of(payload)
    return untaken_languages(capabilities, source, target)


def unfollowed_effort(payload: Payload, capabilities: Capabilities) -> str:
    """Returns why `reasoning_effort: none` does not stop a model from thinking, as text; empty: it does, or may.

    If the payload sets thinking in another way, that takes precedence, see `needed_thinking`.
    """
    if not isinstance(payload, chat_pb2.ChatPayload) or payload.reasoning_effort != chat_pb2.REASONING_EFFORT_NONE:
        return ""
    if needed_thinking(payload) is not ThinkingMode.DEFAULT:
        return ""
    return untaken_words(frozenset(), capabilities.thinking_modes, ThinkingMode.DISABLED)


def names_languages(payload: Payload) -> bool:
    """Whether a payload is a translation that names its source or target language."""
    return any(_languages_of(payload))


def _languages_of(payload: Payload) -> tuple[str, str]:
    """Returns source and target language codes of a translation; empty: unnamed, or to be detected."""
    found = {_SOURCE: "", _TARGET: ""}
    if isinstance(payload, chat_pb2.ChatPayload):
        for extra in payload.extra_parameters.fields:
            is_nested = extra.name == _TEMPLATE_ARGUMENTS
            for item in extra.value.object_value.fields if is_nested else (extra,):
                if item.name in found:
                    found[item.name] = item.value.string_value
    source = found[_SOURCE]
    return "" if source in _NO_LANGUAGES else source, found[_TARGET]


def needed_thinking(payload: Payload) -> ThinkingMode:
    """Returns the payload's thinking mode: from its own field, else from the chat template's argument."""
    if not isinstance(payload, chat_pb2.ChatPayload):
        return ThinkingMode.DEFAULT
    if payload.HasField("thinking"):
        return ThinkingMode.ENABLED if payload.thinking else ThinkingMode.DISABLED
    for extra in payload.extra_parameters.fields:
        if extra.name != _TEMPLATE_ARGUMENTS:
            continue
        for argument in extra.value.object_value.fields:
            if argument.name == _ENABLE_THINKING and argument.value.WhichOneof("kind") == "bool_value":
                return ThinkingMode.ENABLED if argument.value.bool_value else ThinkingMode.DISABLED
    return ThinkingMode.DEFAULT


def drop_thinking_argument(chat: chat_pb2.ChatPayload) -> None:
    """Removes the chat template's argument that `needed_thinking` reads."""
    for extra in chat.extra_parameters.fields:
        if extra.name == _TEMPLATE_ARGUMENTS:
            arguments = extra.value.object_value.fields
            for index in [at for at, argument in enumerate(arguments) if argument.name == _ENABLE_THINKING]:
                del arguments[index]


@dataclass(frozen=True, slots=True)
class VolatileText:
    """A kind of text in system prompts that changes with each request."""

    name: str
    """Its name in warnings."""
    mark: str
    """A substring of all such texts, tested before the pattern for speed."""
    pattern: re.Pattern[str]


VOLATILE_TEXTS: Sequence[VolatileText] = (
    VolatileText(
        # The first system block of Claude Code: `x-anthropic-billing-header: cc_version=2.1.37; cch=a1b2c;`.
        "Anthropic's billing header",
        "x-anthropic-billing-header:",
        re.compile(r"^x-anthropic-billing-header:[^\n]*\n*", re.MULTILINE),
    ),
)


def steady_text(text: str) -> tuple[str, str]:
    """Removes volatile text from a system prompt; returns the rest and the name of the removed text (or empty)."""
    for kind in VOLATILE_TEXTS:
        if kind.mark in text:
            steady, count = kind.pattern.subn("", text)
            if count:
                return steady, kind.name
    return text, ""
