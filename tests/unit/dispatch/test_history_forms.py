"""A conversation that an engine refuses gets the form that the words of the refusal ask for, and loses nothing else."""

from collections.abc import Callable

import pytest
from kit.presence import present

from weft.api.common.v1 import chat_pb2
from weft.dispatch.history_forms import MAX_FORM_TRIES, NO_FORMS, Form, Forms, in_forms, next_forms
from weft.kernel.text.json_objects import to_json_object

USER, MODEL, TOOL, SYSTEM = chat_pb2.ROLE_USER, chat_pb2.ROLE_ASSISTANT, chat_pb2.ROLE_TOOL, chat_pb2.ROLE_SYSTEM
IMAGE = chat_pb2.ContentPart(image=chat_pb2.MediaPart(data=b"x", media_type="image/png"))
ALIEN = "toolu_7QfXw2RkBn4TzLp9VsHd31ya"
Turn = tuple[chat_pb2.Role.ValueType, str]


def said(role: chat_pb2.Role.ValueType, *parts: str | chat_pb2.ContentPart) -> chat_pb2.ChatMessage:
    content = [chat_pb2.ContentPart(text=part) if isinstance(part, str) else part for part in parts]
    return chat_pb2.ChatMessage(role=role, content=content)


def called(*ids: str) -> chat_pb2.ChatMessage:
    calls = [chat_pb2.ToolCallRecord(id=each, name="look", arguments_text="{}") for each in ids]
    return chat_pb2.ChatMessage(role=MODEL, tool_calls=calls)


def result(call_id: str, text: str = "two") -> chat_pb2.ChatMessage:
    message = said(TOOL, text)
    message.tool_call_id = call_id
    return message


def thought(text: str = "y") -> chat_pb2.ChatMessage:
    message = said(MODEL, text)
    message.reasoning = "well"
    return message


def chat(*messages: chat_pb2.ChatMessage) -> chat_pb2.ChatPayload:
    return chat_pb2.ChatPayload(messages=messages)


def turns(payload: chat_pb2.ChatPayload) -> list[Turn]:
    return [(message.role, "|".join(part.text for part in message.content)) for message in payload.messages]


def settled(payload: chat_pb2.ChatPayload, refusal: str, accepts: Callable[[chat_pb2.ChatPayload], bool]) -> Forms:
    """Returns the forms in which an engine with one refusal accepts a chat; fails if it accepts none."""
    forms = NO_FORMS
    for _ in range(MAX_FORM_TRIES):
        if accepts(in_forms(payload, forms)[0]):
            return forms
        forms = present(next_forms(payload, forms, refusal))
    raise AssertionError(f"refused in {forms}")


STRICT = "Jinja Exception: System message must be at the beginning."


def test_mid_conversation_system_turn_is_merged_for_a_strict_template() -> None:
    payload = chat(
        said(SYSTEM, "be brief"), said(USER, "hi"), said(SYSTEM, "the date changed"), said(MODEL, "hello"),
        said(SYSTEM, "a file changed"), said(USER, "go on"),
    )  # fmt: skip
    forms = present(next_forms(payload, NO_FORMS, STRICT))
    fitted, warnings = in_forms(payload, forms)
    assert turns(fitted) == [
        (SYSTEM, "be brief"),
        (USER, "hi\n\n|the date changed"),
        (MODEL, "hello"),
        (USER, "a file changed\n\n|go on"),
    ]
    assert [warning.field for warning in warnings] == ["messages"]
    assert turns(payload)[2] == (SYSTEM, "the date changed"), "another attempt may reach an engine that takes it"


@pytest.mark.parametrize(
    "words",
    [
        "CUDA error: out of memory",
        "temperature must be at most 2",
        "internal server error: list index out of range",
        "the file system is full",
        "This model's maximum context length is 8 tokens",
        "invalid api key",
        "Unsupported parameter: 'max_tokens' is not supported with this model.",
        "",
    ],
)
def test_refusal_unrelated_to_the_conversation_changes_nothing(words: str) -> None:
    payload = chat(
        said(SYSTEM, "a", "b"), said(USER, "hi", "x"), thought(), called(ALIEN), result(ALIEN), said(USER, "go")
    )
    assert next_forms(payload, NO_FORMS, words) is None


def test_images_of_earlier_turns_are_dropped_only_after_the_server_refuses_images() -> None:
    payload = chat(said(USER, IMAGE), said(MODEL, "a cat"), said(USER, "and now?"))
    forms = next_forms(payload, NO_FORMS, "image input is not supported - hint: you may need to provide the mmproj")
    fitted, warnings = in_forms(payload, present(forms))
    assert not any(part.HasField("image") for part in fitted.messages[0].content)
    assert [warning.field for warning in warnings] == ["messages[0].content[0]"]


def test_two_model_turns_at_the_end_are_joined_and_nothing_else() -> None:
    payload = chat(said(USER, "Count."), said(MODEL, "one"), said(MODEL, "two"))
    forms = next_forms(payload, NO_FORMS, "Cannot have 2 or more assistant messages at the end of the list.")
    assert forms == frozenset({Form.JOINED})
    assert turns(in_forms(payload, forms)[0]) == [(USER, "Count."), (MODEL, "one\n\n|two")]


def test_a_call_and_the_models_text_after_it_are_joined() -> None:
    payload = chat(said(USER, "Count."), called("c1"), said(MODEL, "two"))
    (_, joined) = in_forms(payload, frozenset({Form.JOINED}))[0].messages
    assert (joined.content[0].text, joined.tool_calls[0].id) == ("two", "c1")


def _asks(payload: chat_pb2.ChatPayload) -> bool:
    return any(message.role == USER and message.content[0].text for message in payload.messages)


def _alternates(payload: chat_pb2.ChatPayload) -> bool:
    """Mistral's rule: calls and their results do not count."""
    roles = [message.role for message in payload.messages if message.role != TOOL and not message.tool_calls]
    return all((role == USER) == (index % 2 == 0) for index, role in enumerate(roles))


CONVERSATIONS = {
    "system alone": chat(said(SYSTEM, "Say hello.")),
    "summary, call, result": chat(said(SYSTEM, "The user wants cats."), called("c1"), result("c1")),
    "greeting first": chat(said(MODEL, "How can I help?"), said(USER, "Say hello.")),
    "system and greeting": chat(said(SYSTEM, "be brief"), said(MODEL, "How can I help?"), said(USER, "Say hello.")),
    "empty user turn": chat(said(SYSTEM, "Say hello."), said(USER, "")),
    "user after a result": chat(said(USER, "look"), called("c1"), result("c1"), said(USER, "go on")),
    "system in the middle": chat(said(USER, "hi"), said(MODEL, "hello"), said(SYSTEM, "new date"), said(USER, "go")),
    "nothing": chat(),
}


@pytest.mark.parametrize("accepts", [_asks, _alternates])
@pytest.mark.parametrize("title", CONVERSATIONS)
@pytest.mark.parametrize("words", ["Jinja Exception: nope", "Conversation roles must alternate user/assistant/..."])
def test_every_conversation_gets_a_form_for_a_strict_template(
    title: str, words: str, accepts: Callable[[chat_pb2.ChatPayload], bool]
) -> None:
    payload = CONVERSATIONS[title]
    forms = settled(payload, words, accepts)
    fitted = in_forms(payload, forms)[0]
    given = [part.text for message in payload.messages for part in message.content if part.text]
    kept = "|".join(text for _, text in turns(fitted))
    assert all(text in kept for text in given), "nothing is lost"


def test_a_last_turn_of_the_model_is_followed_by_a_user_turn_if_the_engine_asks_for_it() -> None:
    payload = chat(said(USER, "Count."), said(MODEL, "one"))
    words = "Expected last role User or Tool (or Assistant with prefix True) for serving but got assistant"
    assert turns(in_forms(payload, present(next_forms(payload, NO_FORMS, words)))[0])[-1] == (USER, "Continue.")


@pytest.mark.parametrize(
    "words",
    [
        "the id toolu_7 of a tool call has to have 9 letters or digits",
        "Tool call id was toolu_7 but must be a-z, A-Z, 0-9, with a length of 9.",
        "Jinja Exception: Tool call IDs should be alphanumeric strings with length 9!",
        "messages.1.content.0.tool_use.id: String should match pattern '^[a-zA-Z0-9_-]+$'",
        "Invalid 'messages[1].tool_calls[0].id': string too long. Expected a string with maximum length 40",
    ],
)
def test_ids_of_calls_become_nine_letters_and_digits(words: str) -> None:
    payload = chat(said(USER, "x"), called(ALIEN, "call_1", "Ab3dE6gH9"), *map(result, (ALIEN, "call_1", "Ab3dE6gH9")))
    assert next_forms(payload, NO_FORMS, words) == frozenset({Form.SHORT_IDS})
    fitted = in_forms(payload, frozenset({Form.SHORT_IDS}))[0]
    ids = [call.id for call in fitted.messages[1].tool_calls]
    assert [message.tool_call_id for message in fitted.messages[2:]] == ids
    assert len(set(ids)) == 3
    assert all(len(each) == 9 and each.isalnum() for each in ids)
    assert ids[2] == "Ab3dE6gH9"


def test_a_call_keeps_its_short_id_in_the_next_request() -> None:
    """Else the engine's prefix cache would lose the conversation."""
    first, later = chat(called(ALIEN)), chat(called(ALIEN), result(ALIEN), called("call_2"))
    fitted = [in_forms(each, frozenset({Form.SHORT_IDS}))[0].messages[0].tool_calls[0].id for each in (first, later)]
    assert fitted[0] == fitted[1]


@pytest.mark.parametrize(
    "words",
    [
        "messages.0.content has to be a string, not a list",
        "'messages.0.content' : value must be a string",
        "Failed to deserialize the JSON body: messages[0]: invalid type: sequence, expected a string at line 1",
        "json: cannot unmarshal array into Go struct field ChatMessage.messages.content of type string",
        '[{"loc":["body","messages",0,"content"],"msg":"str type expected"}]',
        "Input should be a valid string",
        "content must be a string",
        "Unsupported content type: list",
    ],
)
def test_texts_of_a_message_become_one(words: str) -> None:
    payload = chat(said(SYSTEM, "First.", "Second.\n", "Third."), said(USER, "x"), called("c1"), result("c1"))
    assert next_forms(payload, NO_FORMS, words) == frozenset({Form.TEXT_ALONE})
    fitted = in_forms(payload, frozenset({Form.TEXT_ALONE}))[0]
    assert [[part.text for part in message.content] for message in fitted.messages] == [
        ["First.\nSecond.\nThird."], ["x"], [""], ["two"],
    ]  # fmt: skip


@pytest.mark.parametrize(
    "words",
    [
        "messages.1: the property reasoning_content is not supported",
        "'messages.1' : for 'role:assistant' property 'reasoning_content' is unsupported",
        '{"detail":[{"type":"extra_forbidden","loc":["body","messages",1,"assistant","reasoning_content"]}]}',
        "Invalid JSON payload received. Unknown name \"reasoning_content\" at 'messages[1]': Cannot find field.",
        "Extra inputs are not permitted",
        "messages.1.content.0: Invalid `signature` in `thinking` block",
    ],
)
def test_reasoning_is_left_out_after_a_refusal(words: str) -> None:
    payload = chat(said(USER, "x"), thought("y"), said(USER, "z"))
    payload.messages[1].signed_reasoning.add(text="well", signature="s")
    forms = next_forms(payload, NO_FORMS, words)
    assert forms == frozenset({Form.NO_REASONING})
    message = in_forms(payload, forms)[0].messages[1]
    assert (message.reasoning, len(message.signed_reasoning), message.content[0].text) == ("", 0, "y")


@pytest.mark.parametrize(
    "words",
    [
        "The `reasoning_content` in the thinking mode must be passed back to the API.",
        "thinking is enabled but reasoning_content is missing in assistant tool call message at index 2",
    ],
)
def test_reasoning_returns_if_the_engine_asks_for_it(words: str) -> None:
    payload = chat(said(USER, "x"), thought("y"), said(USER, "z"))
    assert next_forms(payload, NO_FORMS, words) is None
    assert next_forms(payload, frozenset({Form.NO_REASONING}), words) == NO_FORMS


def test_members_that_a_provider_does_not_know_are_left_out() -> None:
    payload = chat(said(USER, "x"), said(MODEL, "y"))
    payload.messages[0].name = "ann"
    payload.messages[1].extra_fields.CopyFrom(to_json_object({"foo": 1}, "extra"))
    forms = next_forms(payload, NO_FORMS, "messages.1.foo: Extra inputs are not permitted")
    assert forms == frozenset({Form.NO_EXTRAS})
    first, second = in_forms(payload, forms)[0].messages
    assert not first.HasField("name")
    assert not second.extra_fields.fields


def test_forms_combine() -> None:
    payload = chat(said(USER, "a", "b"), thought(), called(ALIEN), result(ALIEN), said(USER, "go"))
    forms = NO_FORMS
    for words in (
        "Tool call id has to have 9 letters",
        "reasoning_content: Extra inputs are not permitted",
        "content must be a string",
    ):
        forms = present(next_forms(payload, forms, words))
    assert forms == frozenset({Form.SHORT_IDS, Form.NO_REASONING, Form.TEXT_ALONE})
    assert len(in_forms(payload, forms)[1]) == 3
    assert next_forms(payload, forms, "content must be a string") is None
