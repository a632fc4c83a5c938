"""Claude Code's billing header differs with every request: no prefix of its prompts was cached."""

import pytest

from runner_svc.anthropic_upstream.request import messages_body
from runner_svc.openai_upstream.request import chat_body
from runner_svc.policy.parameters import EngineParameters, ParameterProfile
from weft.api.common.v1 import chat_pb2
from weft.dispatch.payload_description import VOLATILE_TEXTS, describe, steady_text

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
