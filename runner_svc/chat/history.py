"""The conversation history as it is sent to the engine, turn by turn."""

from collections.abc import Sequence

from runner_svc.chat.offer import Offer
from runner_svc.chat.turn import FunctionCall
from runner_svc.policy.platform_prompt import join_system_texts
from weft.api.common.v1 import chat_pb2

_SYSTEM_ROLES = (chat_pb2.ROLE_SYSTEM, chat_pb2.ROLE_DEVELOPER)
_Messages = list[chat_pb2.ChatMessage]


class ConversationHistory:
    """The caller's payload, and the messages of the turns since."""

    def __init__(self, payload: chat_pb2.ChatPayload, offer: Offer, *, joined: bool) -> None:
        """`joined`: several leading system messages become one."""
        self._payload = payload
        self._offer = offer
        self._joined = joined
        self._added: _Messages = []

    def turn(self, prompt: str, *, with_tools: bool, max_tokens: int | None) -> chat_pb2.ChatPayload:
        """Returns the payload of the next turn.

        `prompt` is the platform prompt, empty for none; `with_tools` whether tools of the mesh are offered;
        `max_tokens` is the rest of the caller's limit, None where there is none.
        """
        turn = with_system_prompt(self._payload, prompt, joined=self._joined)
        turn.messages.extend(self._added)
        if max_tokens is not None:
            turn.sampling.max_tokens = max_tokens
        # Where only exhausted tools of the mesh are offered, the list is kept: it is a part of the prompt, and the
        # engine's prefix cache holds up to the first difference.
        keeps_list = not with_tools and not self._offer.caller and not self._offer.signals
        turn.tools.extend(self._offer.functions(with_tools=with_tools or keeps_list))
        if keeps_list:
            turn.tool_choice.mode = chat_pb2.ToolChoice.MODE_NONE
        elif self._added and self._must_not_force(turn.tool_choice):
            turn.tool_choice.mode = chat_pb2.ToolChoice.MODE_AUTO
        return turn

    def add_turn(self, text: str, reasoning: str, calls: Sequence[FunctionCall], results: Sequence[str]) -> None:
        """Add the model's turn and the result of each of its calls, in order."""
        said = chat_pb2.ChatMessage(role=chat_pb2.ROLE_ASSISTANT)
        if text:
            said.content.add(text=text)
        if reasoning:
            said.reasoning = reasoning
        for call in calls:
            said.tool_calls.add(id=call.id, name=call.name, arguments_text=call.arguments_text or "{}")
        self._added.append(said)
        for call, result in zip(calls, results, strict=True):
            answer = chat_pb2.ChatMessage(role=chat_pb2.ROLE_TOOL, tool_call_id=call.id)
            answer.content.add(text=result)
            self._added.append(answer)

    def _must_not_force(self, choice: chat_pb2.ToolChoice) -> bool:
        """Whether the caller's tool choice would force calls in every further turn."""
        if choice.WhichOneof("kind") == "function_name":
            return choice.function_name not in self._offer.caller
        return choice.mode == chat_pb2.ToolChoice.MODE_REQUIRED and not self._offer.caller


def needs_system_prompt(payload: chat_pb2.ChatPayload, prompt: str, *, joined: bool) -> bool:
    """Whether `with_system_prompt` would change anything."""
    return bool(prompt) or (joined and _leading_systems(payload) > 1)


def with_system_prompt(payload: chat_pb2.ChatPayload, prompt: str, *, joined: bool) -> chat_pb2.ChatPayload:
    """A copy of `payload` that begins with `prompt`, and with one system message where `joined`.

    System messages in mid-conversation stay where they are; so does a leading one that holds more than text.
    """
    prepared = chat_pb2.ChatPayload()
    prepared.CopyFrom(payload)
    count = _leading_systems(payload)
    systems = list(payload.messages[:count])
    if prompt:
        systems.insert(0, _system(prompt))
    if joined and len(systems) > 1 and all(map(_is_text, systems)):
        systems = [_system(join_system_texts([_text(message) for message in systems]))]
    del prepared.messages[:]
    prepared.messages.extend(systems)
    prepared.messages.extend(payload.messages[count:])
    return prepared


def _leading_systems(payload: chat_pb2.ChatPayload) -> int:
    for index, message in enumerate(payload.messages):
        if message.role not in _SYSTEM_ROLES:
            return index
    return len(payload.messages)


def _system(text: str) -> chat_pb2.ChatMessage:
    return chat_pb2.ChatMessage(role=chat_pb2.ROLE_SYSTEM, content=[chat_pb2.ContentPart(text=text)])


def _is_text(message: chat_pb2.ChatMessage) -> bool:
    return all(part.WhichOneof("kind") == "text" for part in message.content)


def _text(message: chat_pb2.ChatMessage) -> str:
    return "".join(part.text for part in message.content)
