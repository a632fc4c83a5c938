"""The description of a payload for the scheduler: size, required skills, and digests of its beginning.

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
from weft.kernel.abilities import Abilities, ThinkingMode, untaken_languages, untaken_words
from weft.kernel.request import CHARS_PER_TOKEN, PREFIX_ENDS, Skill
from weft.kernel.value import value_class

TOKENS_PER_MESSAGE = 4
"""Tokens that chat templates add per message."""
TOKENS_PER_MEDIUM = 512
"""An image of usual size in a vision model, or some 20 s of audio."""
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
"""Payloads that are answered without generated tokens."""
Payload = GeneratingPayload | WholePayload

_NO_SKILLS: frozenset[Skill] = frozenset()


@value_class(kw_only=True)
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
    """Describes a payload. Prefixes with different salts (tenant and cache tag) have different digests.

    `unread` returns the skills that all its models lack: media of earlier turns that need them reach no engine.
    """
    prompt = _prompt_of(payload)
    skills = _NO_SKILLS
    # Most prompts are text alone: no look at each part once more.
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


def affinity_key(session: str, salt: str) -> bytes:
    """Returns the key of a session; empty: no session. Sessions with different salts have different keys."""
    if not session:
        return b""
    return hashlib.blake2b(f"{salt}\0{session}".encode(), digest_size=_KEY_BYTES).digest()


def prefix_digests(pieces: Iterable[str], salt: str) -> tuple[int, ...]:
    """Returns digests of ever longer prefixes, one per entry of PREFIX_ENDS that the text reaches."""
    text = _beginning(pieces)
    if len(text) < PREFIX_ENDS[0]:
        return ()
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
    """Returns the digest of a payload; of a long one its ends and its length count."""
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
    """What a prompt is made of."""

    pieces: Sequence[str]
    """Its text in order, with roles."""
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
            # The query is read with each document by itself: the longest must fit into the context, not all of them.
            return _Prompt([payload.query, max(payload.documents, key=len, default="")])
        case _:
            # Tokenizing generates nothing; images and recordings have other measures.
            return _Prompt([])


def _chat_prompt(chat: chat_pb2.ChatPayload) -> _Prompt:
    """Returns the prompt of a chat, after one look at each part."""
    pieces = [f"{tool.function.name}\0{tool.function.description}\0" for tool in chat.tools]
    is_text_alone, media = not pieces, 0
    for message in chat.messages:
        pieces.append(f"\0{message.role}\0")
        is_system = message.role in SYSTEM_ROLES
        for part in message.content:
            if text := part.text:
                pieces.append(steady_text(text)[0] if is_system else text)
            else:
                media += 1
        pieces += [call.arguments_text for call in message.tool_calls]
    return _Prompt(pieces, media, is_text_alone and not media)


def _prompt_tokens(payload: Payload, prompt: _Prompt) -> int:
    match payload:
        # Each is read by itself: the longest must fit into the context, not all of them.
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
    """Over all choices; None: it does not say."""
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
    """Returns what a model must be able to do for a payload, beyond text.

    Media of earlier turns need no skill: a model that lacks it gets notes in their place (`weft.dispatch.history`).
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
"""Sources that are to be detected."""


def untaken_words_of(payload: Payload, abilities: Abilities) -> str:
    """Returns what a model with these abilities does not take of a payload, as text; empty: it takes all of it."""
    lacking = needed_skills(payload) & abilities.lacking
    words = untaken_words(lacking, abilities.thinking_modes, needed_thinking(payload))
    if words or not (abilities.source_languages or abilities.target_languages):
        return words
    source, target = _languages_of(payload)
    return untaken_languages(abilities, source, target)


def unfollowed_effort(payload: Payload, abilities: Abilities) -> str:
    """Returns why `reasoning_effort: none` does not keep a model from thinking, as text; empty: it does, or may.

    A payload that sets the thinking otherwise is judged by that, see `needed_thinking`.
    """
    if not isinstance(payload, chat_pb2.ChatPayload) or payload.reasoning_effort != chat_pb2.REASONING_EFFORT_NONE:
        return ""
    if needed_thinking(payload) is not ThinkingMode.DEFAULT:
        return ""
    return untaken_words(frozenset(), abilities.thinking_modes, ThinkingMode.DISABLED)


def names_languages(payload: Payload) -> bool:
    """Whether a payload is a translation from or into a language that it names."""
    return any(_languages_of(payload))


def _languages_of(payload: Payload) -> tuple[str, str]:
    """Returns the codes of the languages of a translation; empty: not named, or to be detected."""
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
    """Returns how a payload sets the model's thinking: by its own field, else by the argument of the chat template."""
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


@dataclass(frozen=True, slots=True)
class VolatileText:
    """A kind of such text."""

    name: str
    """What it is, for warnings."""
    mark: str
    """A text that is in all of it: most prompts are not searched further."""
    pattern: re.Pattern[str]


VOLATILE_TEXTS: Sequence[VolatileText] = (
    VolatileText(
        # Claude Code's first system block: `x-anthropic-billing-header: cc_version=2.1.37; cch=a1b2c;`.
        "Anthropic's billing header",
        "x-anthropic-billing-header:",
        re.compile(r"^x-anthropic-billing-header:[^\n]*\n*", re.MULTILINE),
    ),
)


def steady_text(text: str) -> tuple[str, str]:
    """Returns the text of a system prompt without what changes, and what was left out; empty: nothing was."""
    for kind in VOLATILE_TEXTS:
        if kind.mark in text:
            steady, count = kind.pattern.subn("", text)
            if count:
                return steady, kind.name
    return text, ""
