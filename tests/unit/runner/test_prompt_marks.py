"""Prompt marks measure the common prefix of two prompts, without the text that changes with each request."""

import pytest

from runner_svc.anthropic_upstream.anthropic_request import messages_body
from runner_svc.cache.model_cache import MARK_BYTES, MAX_MARKS, prompt_marks
from runner_svc.openai_upstream.openai_request import chat_body
from runner_svc.policy.parameters import EngineParameters, ParameterProfile
from weft.api.common.v1 import chat_pb2, completion_pb2
from weft.dispatch.payload_description import VOLATILE_TEXTS, describe, steady_text


def _text(*prompts: str) -> completion_pb2.CompletionPayload:
    return completion_pb2.CompletionPayload(prompts=[completion_pb2.PromptInput(text=prompt) for prompt in prompts])


def _chat(*texts: str) -> chat_pb2.ChatPayload:
    roles = (chat_pb2.ROLE_USER, chat_pb2.ROLE_ASSISTANT)
    return chat_pb2.ChatPayload(
        messages=[
            chat_pb2.ChatMessage(role=roles[index % 2], content=[chat_pb2.ContentPart(text=text)])
            for index, text in enumerate(texts)
        ]
    )


def _common(one: tuple[bytes, ...], other: tuple[bytes, ...]) -> int:
    return next((index for index, pair in enumerate(zip(one, other, strict=False)) if pair[0] != pair[1]), len(one))


def test_continued_conversation_starts_with_all_its_earlier_marks() -> None:
    earlier, later = prompt_marks(_chat("hello")), prompt_marks(_chat("hello", "hi", "more"))
    assert later[: len(earlier)] == earlier
    assert len(later) == 3


def test_long_text_with_a_different_end_shares_the_marks_before_it() -> None:
    document = "word " * MARK_BYTES
    one, other = prompt_marks(_text(document + "one?")), prompt_marks(_text(document + "two?"))
    assert _common(one, other) == len(document) // MARK_BYTES


def test_texts_with_different_beginnings_share_no_marks() -> None:
    assert _common(prompt_marks(_text("x" + "same" * 500)), prompt_marks(_text("y" + "same" * 500))) == 0


def test_the_header_of_claude_code_that_no_engine_gets_changes_no_mark() -> None:
    """Each turn took another slot, and agents lost all of their cached prompts."""

    def chat(check: str) -> chat_pb2.ChatPayload:
        parts = [f"x-anthropic-billing-header: cc_version=2.1.101; cch={check};", "You are an agent."]
        texts = [chat_pb2.ContentPart(text=part) for part in parts]
        return chat_pb2.ChatPayload(messages=[chat_pb2.ChatMessage(role=chat_pb2.ROLE_SYSTEM, content=texts)])

    assert prompt_marks(chat("a1b2c")) == prompt_marks(chat("d3e4f"))


def test_same_text_in_another_role_has_different_marks() -> None:
    system = chat_pb2.ChatMessage(role=chat_pb2.ROLE_SYSTEM, content=[chat_pb2.ContentPart(text="hello")])
    assert prompt_marks(chat_pb2.ChatPayload(messages=[system])) != prompt_marks(_chat("hello"))


def test_token_ids_tools_and_images_are_marked_too() -> None:
    tokens = [
        completion_pb2.CompletionPayload(
            prompts=[completion_pb2.PromptInput(tokens=completion_pb2.TokenIds(ids=[1, 2, last]))]
        )
        for last in (3, 4)
    ]
    assert prompt_marks(tokens[0]) != prompt_marks(tokens[1])
    tool = chat_pb2.Tool(function=chat_pb2.FunctionTool(name="f"))
    assert prompt_marks(chat_pb2.ChatPayload(tools=[tool], messages=_chat("a").messages)) != prompt_marks(_chat("a"))
    images = [chat_pb2.ContentPart(image=chat_pb2.MediaPart(data=data)) for data in (b"1", b"2")]
    pictures = [
        chat_pb2.ChatPayload(messages=[chat_pb2.ChatMessage(role=chat_pb2.ROLE_USER, content=[image])])
        for image in images
    ]
    assert prompt_marks(pictures[0]) != prompt_marks(pictures[1])


def test_number_of_marks_is_bounded() -> None:
    assert len(prompt_marks(_text("x" * MARK_BYTES * (MAX_MARKS + 10)))) == MAX_MARKS
    assert len(prompt_marks(_chat(*["m"] * (MAX_MARKS + 10)))) == MAX_MARKS


PROFILE = ParameterProfile(engine=EngineParameters(engine="an engine"))
RULES = "You are Claude Code.\n" + "Be brief. " * 1_024


def header(changing: str) -> str:
    return f"x-anthropic-billing-header: cc_version=2.1.37.{changing}; cc_entrypoint=cli; cch={changing};"


def chat(*texts: str, role: chat_pb2.Role.ValueType = chat_pb2.ROLE_SYSTEM) -> chat_pb2.ChatPayload:
    content = [chat_pb2.ContentPart(text=text) for text in texts]
    user = chat_pb2.ChatMessage(role=chat_pb2.ROLE_USER, content=[chat_pb2.ContentPart(text="hi")])
    return chat_pb2.ChatPayload(messages=[chat_pb2.ChatMessage(role=role, content=content), user])


@pytest.mark.parametrize(
    ("given", "steady"),
    [
        (header("a1b2c"), ""),
        (f"{header('a1b2c')}\n\nYou are", "You are"),
        (f"The platform.\n\n{header('a1b2c')}\nYou are", "The platform.\n\nYou are"),
        ("the word x-anthropic-billing-header: in a line", "the word x-anthropic-billing-header: in a line"),
        ("You are", "You are"),
    ],
)
def test_volatile_text_is_removed_from_a_system_prompt(given: str, steady: str) -> None:
    assert steady_text(given) == (steady, VOLATILE_TEXTS[0].name if steady != given else "")


@pytest.mark.parametrize("as_one", [False, True])
def test_engine_gets_a_stable_prompt_and_the_caller_a_warning(as_one: bool) -> None:
    def sent(changing: str) -> object:
        texts = [f"{header(changing)}\n{RULES}"] if as_one else [header(changing), RULES]
        prepared = chat_body(chat(*texts), "m", PROFILE)
        (warning,) = [event.warning for event in prepared.warnings]
        assert (warning.field, "billing header" in warning.message) == ("messages[0].content", True)
        return prepared.body["messages"]

    assert sent("a1b2c") == sent("d3e4f")
    assert sent("a1b2c") == [{"role": "system", "content": RULES}, {"role": "user", "content": "hi"}]


def test_prefix_digest_ignores_volatile_text() -> None:
    digests = {describe(chat(header(changing), RULES), salt="").prefix_digests for changing in ("a1b2c", "d3e4f")}
    assert len(digests) == 1


def test_provider_that_requires_the_header_receives_it() -> None:
    body = messages_body(chat(header("a1b2c"), RULES), "m", PROFILE).body
    assert body["system"][0]["text"] == header("a1b2c")


def test_user_text_is_unchanged() -> None:
    payload = chat(header("a1b2c"), role=chat_pb2.ROLE_USER)
    assert chat_body(payload, "m", PROFILE).body["messages"][0]["content"] == header("a1b2c")
