"""Forms of a conversation that some engines require, found from the words of their refusals. Pure.

A form changes what engines refuse and keeps the rest. Forms combine: `Form` lists them in the order in which they are
applied, and `next_forms` adds one per refusal, the one that loses least.
"""

import hashlib
import re
from collections.abc import Sequence
from enum import Enum
from types import MappingProxyType

from weft.api.common.v1 import chat_pb2, json_value_pb2, warning_pb2
from weft.dispatch.history import MEDIA_SKILLS, SYSTEM_ROLES, note_media, unsupported

MAX_FORM_TRIES = 10
"""Maximum number of forms in which a request is sent to one engine."""
ADDED_TURN = "Continue."
"""Text of a user turn that an engine requires and the caller has not sent."""
ADDED_ANSWER = "OK."
"""Text of a model turn that an engine requires between a tool's result and a user turn."""
_ID_CHARS = 9
_FIELD = "messages"
_REASONING_NAMES = ("reasoning", "thinking", "thought_text")


class Form(Enum):
    """A change of a conversation; the value says for the caller what was changed."""

    __hash__ = object.__hash__  # Enum's own takes two calls, and each request needs it.
    NO_MEDIA = "images and recordings of earlier turns became notes"
    NO_REASONING = "the reasoning of earlier turns was left out"
    NO_EXTRAS = "members of messages that the API does not define, and names, were left out"
    SHORT_IDS = "the ids of tool calls were replaced by ids of nine letters and digits"
    NO_SYSTEM = "system turns became user turns"
    SYSTEM_FIRST = "system turns in mid-conversation and successive turns of one role were joined to others"
    JOINED = "successive turns of one role were joined"
    USER_FIRST = "a short user turn was added at the beginning"
    TOOLS_ANSWERED = "a short model turn was added between a tool's result and the user turn after it"
    USER_LAST = "a short user turn was added at the end"
    TEXT_ALONE = "the texts of a message were joined to one"


Forms = frozenset[Form]
NO_FORMS: Forms = frozenset()


def _words(pattern: str) -> re.Pattern[str]:
    return re.compile(pattern, re.IGNORECASE | re.VERBOSE | re.DOTALL)


_WANTS_REASONING = _words(
    r"(reasoning|thinking).{0,80}(\bmissing|\brequired|passed\ back|must\ be\ (sent|included|provided|present))"
    r"|\b(missing|requires?|expected)\b.{0,60}(reasoning|thinking)"
)
_UNKNOWN = r"(unknown|unrecogni[sz]ed|unexpected|unsupported|undefined|not\ (supported|permitted|allowed|recognized))"
_UNKNOWN_MEMBER = _words(
    r"extra_forbidden|extra\ (input|field)|additional\ propert"
    rf"|messages?\b.{{0,120}}{_UNKNOWN}|{_UNKNOWN}.{{0,120}}messages?\b"
)
_BY_WORDS: Sequence[tuple[re.Pattern[str], tuple[Form, ...]]] = (
    (
        _words(
            r"(\bids?\b|call_?ids?|use_?ids?|\]?\.id\b).{0,160}"
            r"(letters|digits|alphanum|characters|length|pattern|too\ long|a-z|invalid|\b(9|nine)\b)"
            r"|(invalid|malformed|bad).{0,40}(\bids?\b|call_?id|use_?id)"
        ),
        (Form.SHORT_IDS,),
    ),
    (_words(r"reasoning(?![_.\ ]?effort)|thinking(?!_budget)"), (Form.NO_REASONING,)),
    (_words(r"image|audio|vision|\bmedia|modal|mmproj|content.?part|content.?type"), (Form.NO_MEDIA,)),
    (
        _words(
            r"content.{0,80}\b(string|str|text)\b|\b(string|str)\b.{0,80}(content|list|array|sequence)"
            r"|(sequence|unmarshal|\blist\b|\barray\b).{0,80}\b(string|str)\b"
            r"|content.{0,40}(part|block|type|array|list)|(valid|be\ an?|type)\ string"
        ),
        (Form.TEXT_ALONE,),
    ),
    (_words(r"prefill|\b(last|final)\ (role|message|turn)|\bends?\ (in|with)\b"), (Form.JOINED, Form.USER_LAST)),
    (
        _words(
            r"template|jinja|raise_exception|\broles?\b|alternat|conversation|consecutive|successive|\bturns\b"
            r"|system.{0,20}(message|turn|prompt|instruction)|(message|turn|prompt).{0,20}system"
            r"|\b(user|assistant|human)\b.{0,30}(message|turn|quer|first|missing)|\bmodel\b.{0,20}\b(turn|first|speaks)"
            r"|(message|turn|quer\w+)\b.{0,30}\b(user|assistant|human)\b|prefill|\b(last|final)\ (message|turn)"
        ),
        (Form.JOINED, Form.SYSTEM_FIRST, Form.USER_FIRST, Form.TOOLS_ANSWERED, Form.NO_SYSTEM, Form.USER_LAST),
    ),
    (_UNKNOWN_MEMBER, (Form.NO_EXTRAS, Form.NO_REASONING)),
)
"""Words of refusals, and the forms that may help, first what is most specific. The words are those of vLLM, SGLang,
llama.cpp, chat templates, Mistral, Groq, Cerebras, DeepSeek, SiliconFlow, OpenAI, Anthropic and pydantic."""


def next_forms(chat: chat_pb2.ChatPayload, forms: Forms, refusal: str) -> Forms | None:
    """Returns the forms to try after an engine refused the chat in `forms` with this message.

    None: the message is not about the form of the conversation, or no other form would change it.
    """
    wants_reasoning = _WANTS_REASONING.search(refusal) is not None
    if wants_reasoning and Form.NO_REASONING in forms:
        return forms - {Form.NO_REASONING}
    refused = in_forms(chat, forms)[0]
    for words, helpful in _BY_WORDS:
        if words.search(refusal) is None:
            continue
        for form in helpful:
            is_possible = form not in forms and not (form is Form.NO_REASONING and wants_reasoning)
            if is_possible and in_forms(chat, forms | {form})[0] != refused:
                return forms | {form}
    return None


def is_about_form(refusal: str) -> bool:
    """Whether the words of a refusal may concern the form of a conversation."""
    return any(words.search(refusal) for words, _ in _BY_WORDS)


def in_forms(chat: chat_pb2.ChatPayload, forms: Forms) -> tuple[chat_pb2.ChatPayload, list[warning_pb2.Warning]]:
    """Returns a chat in these forms, and a warning about each that changed it; the given chat if none does."""
    fitted, warnings = chat, list[warning_pb2.Warning]()
    # Most engines accept all forms, and going through them makes some forty calls.
    for form in (each for each in Form if each in forms) if forms else ():
        changed = chat_pb2.ChatPayload()
        changed.CopyFrom(fitted)
        if form is Form.NO_MEDIA:
            warnings += note_media(changed, frozenset(MEDIA_SKILLS.values()))
        else:
            _CHANGES[form](changed)
            if changed != fitted:
                warnings.append(unsupported(_FIELD, f"{form.value}, as the model's engine requires"))
        fitted = changed
    return (fitted, warnings) if warnings else (chat, [])


def _leave_out_reasoning(chat: chat_pb2.ChatPayload) -> None:
    for message in chat.messages:
        message.ClearField("reasoning")
        message.ClearField("signed_reasoning")
        kept = [field for field in message.extra_fields.fields if not field.name.startswith(_REASONING_NAMES)]
        if len(kept) != len(message.extra_fields.fields):
            message.extra_fields.CopyFrom(json_value_pb2.JsonObject(fields=kept))


def _leave_out_extras(chat: chat_pb2.ChatPayload) -> None:
    for message in chat.messages:
        message.ClearField("extra_fields")
        message.ClearField("name")
        for call in message.tool_calls:
            call.ClearField("extra_fields")


def _shorten_ids(chat: chat_pb2.ChatPayload) -> None:
    """Replaces ids that are not nine letters or digits: equal ids by equal ones, different ids by different ones.

    The new id depends on the old one alone, unless two collide, so that prompts begin as in the request before.
    """
    calls = [call for message in chat.messages for call in message.tool_calls]
    results = [message for message in chat.messages if message.HasField("tool_call_id")]
    given = dict.fromkeys([*(call.id for call in calls), *(result.tool_call_id for result in results)])
    new = {each: each for each in given if len(each) == _ID_CHARS and each.isascii() and each.isalnum()}
    used = set(new)
    for each in given:
        salt = each
        while each not in new:
            salted = hashlib.sha256(salt.encode()).hexdigest()[:_ID_CHARS]
            if salted not in used:
                new[each] = salted
                used.add(salted)
            salt += "+"
    for call in calls:
        call.id = new[call.id]
    for result in results:
        result.tool_call_id = new[result.tool_call_id]


def _leave_out_system(chat: chat_pb2.ChatPayload) -> None:
    found = [message for message in chat.messages if message.role in SYSTEM_ROLES]
    for message in found:
        message.role = chat_pb2.ROLE_USER
    if found:
        _join(chat)


def _begin_with_system(chat: chat_pb2.ChatPayload) -> None:
    """Joins each later system turn to the turn before it; after a model's turn it becomes a user turn."""
    later = [index for index, message in enumerate(chat.messages) if index and message.role in SYSTEM_ROLES]
    for index in later:
        message, before = chat.messages[index], chat.messages[index - 1]
        message.role = chat_pb2.ROLE_USER if before.role == chat_pb2.ROLE_ASSISTANT else before.role
        if message.role == chat_pb2.ROLE_TOOL:
            message.tool_call_id = before.tool_call_id
    if later:
        _join(chat, joins_results=True)


def _join(chat: chat_pb2.ChatPayload, *, joins_results: bool = False) -> None:
    """Joins successive turns of one role; results of tools only if they are of one call and `joins_results`."""
    turns: list[chat_pb2.ChatMessage] = []
    for message in chat.messages:
        last = turns[-1] if turns else None
        if last is None or last.role != message.role or not _may_join(last, message, joins_results):
            turns.append(chat_pb2.ChatMessage())
            turns[-1].CopyFrom(message)
            continue
        if last.content and last.content[-1].text and message.content:
            # Engines join text parts without a separator.
            last.content[-1].text += "\n\n"
        # Fields of both messages: parts and calls in order; of other texts the later one.
        reasoning = last.reasoning + message.reasoning
        last.MergeFrom(message)
        if reasoning:
            last.reasoning = reasoning
    _replace(chat, turns)


def _may_join(last: chat_pb2.ChatMessage, message: chat_pb2.ChatMessage, joins_results: bool) -> bool:
    is_result = message.role == chat_pb2.ROLE_TOOL
    return not is_result or (joins_results and last.tool_call_id == message.tool_call_id)


def _begin_with_user(chat: chat_pb2.ChatPayload) -> None:
    turns = list(chat.messages)
    at = next((index for index, each in enumerate(turns) if each.role not in SYSTEM_ROLES), len(turns))
    first = turns[at] if at < len(turns) else None
    if first is None or first.role != chat_pb2.ROLE_USER:
        turns.insert(at, _turn(chat_pb2.ROLE_USER, ADDED_TURN))
    elif not any(part.WhichOneof("kind") != "text" or part.text.strip() for part in first.content):
        del first.content[:]
        first.content.add(text=ADDED_TURN)
    _replace(chat, turns)


def _answer_tools(chat: chat_pb2.ChatPayload) -> None:
    turns: list[chat_pb2.ChatMessage] = []
    for message in chat.messages:
        if turns and turns[-1].role == chat_pb2.ROLE_TOOL and message.role == chat_pb2.ROLE_USER:
            turns.append(_turn(chat_pb2.ROLE_ASSISTANT, ADDED_ANSWER))
        turns.append(message)
    _replace(chat, turns)


def _end_with_user(chat: chat_pb2.ChatPayload) -> None:
    last = chat.messages[-1] if chat.messages else chat_pb2.ChatMessage()
    if last.role == chat_pb2.ROLE_ASSISTANT and not last.tool_calls:
        chat.messages.append(_turn(chat_pb2.ROLE_USER, ADDED_TURN))


def _join_texts(chat: chat_pb2.ChatPayload) -> None:
    """Makes one text of those of each message without media; a call without text gets an empty one, not null."""
    for message in chat.messages:
        parts = list(message.content)
        is_null = not parts and bool(message.tool_calls)
        if not (len(parts) > 1 or is_null) or any(part.WhichOneof("kind") != "text" for part in parts):
            continue
        text = ""
        for part in parts:
            text += ("\n" if text and not text.endswith("\n") else "") + part.text
        del message.content[:]
        message.content.add(text=text)


def _turn(role: chat_pb2.Role.ValueType, text: str) -> chat_pb2.ChatMessage:
    return chat_pb2.ChatMessage(role=role, content=[chat_pb2.ContentPart(text=text)])


def _replace(chat: chat_pb2.ChatPayload, turns: Sequence[chat_pb2.ChatMessage]) -> None:
    fresh = chat_pb2.ChatPayload(messages=turns)
    del chat.messages[:]
    chat.messages.MergeFrom(fresh.messages)


_CHANGES = MappingProxyType(
    {
        Form.NO_REASONING: _leave_out_reasoning,
        Form.NO_EXTRAS: _leave_out_extras,
        Form.SHORT_IDS: _shorten_ids,
        Form.NO_SYSTEM: _leave_out_system,
        Form.SYSTEM_FIRST: _begin_with_system,
        Form.JOINED: _join,
        Form.USER_FIRST: _begin_with_user,
        Form.TOOLS_ANSWERED: _answer_tools,
        Form.USER_LAST: _end_with_user,
        Form.TEXT_ALONE: _join_texts,
    }
)
