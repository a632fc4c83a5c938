"""Earlier turns of a conversation, which clients send again with each request. Pure.

Content there that a model cannot handle becomes text, with a warning: an error would repeat with every turn and end the
conversation. Only the last turn, which the caller can change, is rejected.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import msgspec

from weft.api.common.v1 import chat_pb2, warning_pb2
from weft.kernel.requests.request_values import Skill

MEDIA_SKILLS = {"image": Skill.IMAGE, "audio": Skill.AUDIO}
"""The skill that each kind of content part requires besides text."""
SUMMARY_HEAD = "[The conversation up to here was replaced by this summary of it, which you wrote.]\n\n"
"""The beginning of a text with a model's summary, and of no other."""
SYSTEM_ROLES = frozenset({chat_pb2.ROLE_SYSTEM, chat_pb2.ROLE_DEVELOPER})
MAX_HISTORY_WARNINGS = 16
"""Maximum number of warnings about a conversation; further parts are converted without a warning."""

MAX_FIELD_CHARS = 256
MAX_WARNING_CHARS = 500

_arguments = msgspec.json.Decoder(dict[str, Any])
_text = msgspec.json.Decoder(str)


def earlier_turns(roles: Sequence[chat_pb2.Role.ValueType]) -> list[bool]:
    """Returns for each message whether it is history: an earlier turn, a model's message or a tool's result.

    The last turn is what follows the model's last message. If it contains a tool's result, the model's turn continues,
    so everything there is history too, such as a file that a tool has read. Model messages at the end are the beginning
    of the answer.
    """
    end = len(roles)
    while end and roles[end - 1] == chat_pb2.ROLE_ASSISTANT:
        end -= 1
    begin = end
    while begin and roles[begin - 1] != chat_pb2.ROLE_ASSISTANT:
        begin -= 1
    if chat_pb2.ROLE_TOOL in roles[begin:end]:
        begin = end
    return [not begin <= index < end for index in range(len(roles))]


def answered_turns(roles: Sequence[chat_pb2.Role.ValueType]) -> list[bool]:
    """Returns for each message whether the other side (model or caller) speaks after it."""
    answered, later = [], set[bool]()
    for role in reversed(roles):
        is_model = role == chat_pb2.ROLE_ASSISTANT
        answered.append((not is_model) in later)
        later.add(is_model)
    return answered[::-1]


def media_skills(chat: chat_pb2.ChatPayload, *, earlier: bool) -> frozenset[Skill]:
    """Returns the skills that images and recordings require, in earlier turns or in the last one."""
    return frozenset(
        MEDIA_SKILLS[part.WhichOneof("kind") or ""] for _, part, is_earlier in _media(chat) if is_earlier is earlier
    )


def unread_media(chat: chat_pb2.ChatPayload, unread: frozenset[Skill]) -> int:
    """Returns the number of images and recordings in earlier turns that require one of these skills."""
    return sum(is_earlier and _skill(part) in unread for _, part, is_earlier in _media(chat))


def with_notes(
    chat: chat_pb2.ChatPayload, lacking: frozenset[Skill]
) -> tuple[chat_pb2.ChatPayload, list[warning_pb2.Warning]]:
    """Replaces media in earlier turns by notes for a model that lacks these skills; returns the chat and warnings.

    Returns the given chat if there is nothing to replace.
    """
    if not unread_media(chat, lacking):
        return chat, []
    fitted = chat_pb2.ChatPayload()
    fitted.CopyFrom(chat)
    return fitted, note_media(fitted, lacking)


def note_media(chat: chat_pb2.ChatPayload, lacking: frozenset[Skill]) -> list[warning_pb2.Warning]:
    """Replaces media in earlier turns by notes, in the given chat; see `with_notes`."""
    warnings: list[warning_pb2.Warning] = []
    for field, part, is_earlier in _media(chat):
        if is_earlier and (skill := _skill(part)) in lacking:
            name = "image" if skill is Skill.IMAGE else "recording"
            part.text = left_out_note(name)
            warnings.append(converted(field, f"this model takes no {name}s"))
    return warnings[:MAX_HISTORY_WARNINGS]


def left_out_note(what: str, why: str = "this model cannot read it") -> str:
    """Returns the text that replaces content of an earlier turn that the model does not get."""
    return f"[{what} left out: {why}]"


def converted(field: str, problem: str) -> warning_pb2.Warning:
    """Returns the warning that a part of an earlier turn became text; `problem` follows the field's name."""
    return unsupported(field, f"{problem}; as it is part of an earlier turn, the model got a note in its place")


def unsupported(field: str, message: str) -> warning_pb2.Warning:
    """Returns the warning that a field was changed or not used, within the limits of warnings."""
    code = warning_pb2.WARNING_CODE_UNSUPPORTED_PARAMETER
    return warning_pb2.Warning(code=code, field=field[:MAX_FIELD_CHARS], message=message[:MAX_WARNING_CHARS])


def object_arguments(text: str) -> str:
    """Returns the arguments of an earlier tool call as a JSON object, as engines and templates require.

    Empty arguments become an empty object, and an object in a JSON string is unpacked. Any other text, such as
    truncated JSON, becomes the value of `arguments`.
    """
    if not text.strip():
        return "{}"
    value = text
    for _ in range(2):
        try:
            _arguments.decode(value)
        except (msgspec.MsgspecError, UnicodeError, RecursionError):
            pass
        else:
            return value
        try:
            value = _text.decode(value)
        except (msgspec.MsgspecError, UnicodeError, RecursionError):
            break
    if text.strip() == "null":
        return "{}"
    return msgspec.json.encode({"arguments": text.encode("utf-8", "replace").decode()}).decode()


def _media(chat: chat_pb2.ChatPayload) -> Iterator[tuple[str, chat_pb2.ContentPart, bool]]:
    """Yields the field and part of each image and recording, and whether it is in an earlier turn."""
    earlier: list[bool] | None = None
    for index, message in enumerate(chat.messages):
        for position, part in enumerate(message.content):
            if part.WhichOneof("kind") in MEDIA_SKILLS:
                if earlier is None:
                    earlier = earlier_turns([each.role for each in chat.messages])
                yield f"messages[{index}].content[{position}]", part, earlier[index]


def _skill(part: chat_pb2.ContentPart) -> Skill | None:
    return MEDIA_SKILLS.get(part.WhichOneof("kind") or "")
