"""What a scheduler is told of a payload, and what it cannot tell from it."""

from typing import Any

import pytest

from weft.api.common.v1 import agent_behaviour_pb2, chat_pb2, completion_pb2, embedding_pb2, tokenize_pb2
from weft.dispatch.payload_description import (
    TOKENS_PER_MEDIUM,
    Description,
    affinity_key,
    describe,
    names_languages,
    prefix_digests,
    prompt_prefixes,
    unfollowed_effort,
    untaken_words_of,
)
from weft.kernel.requests.capabilities import UNKNOWN, Capabilities, ThinkingMode
from weft.kernel.requests.request_values import PREFIX_ENDS, Skill
from weft.kernel.text.json_objects import to_json_object


def _chat(*texts: str) -> chat_pb2.ChatPayload:
    payload = chat_pb2.ChatPayload()
    for text in texts:
        payload.messages.add(role=chat_pb2.ROLE_USER).content.add(text=text)
    return payload


def test_four_prompt_characters_count_as_one_token() -> None:
    assert 1_000 <= describe(_chat("x" * 4_000), salt="t").prompt_tokens <= 1_010


def test_empty_text_is_no_medium() -> None:
    """Regression: clients send `content: ""` with each tool call, and each one counted as an image of 512 tokens."""
    payload = _chat("x" * 4_000, "", "x")
    assert describe(payload, salt="t").prompt_tokens <= 1_020
    assert prompt_prefixes(payload, "t") == (describe(payload, salt="t").prefix_digests, 4_010)


def test_token_ids_count_one_each() -> None:
    completion, embedding = completion_pb2.CompletionPayload(), embedding_pb2.EmbeddingPayload()
    completion.prompts.add().tokens.ids.extend(range(70))
    embedding.inputs.add().tokens.ids.extend(range(30))
    assert describe(completion, salt="t").prompt_tokens == 70
    assert describe(embedding, salt="t").prompt_tokens == 30


def test_image_needs_a_vision_model_and_counts_by_its_size() -> None:
    payload = _chat("what is this?")
    payload.messages[0].content.add().image.media_type = "image/png"
    described = describe(payload, salt="t")
    assert described.skills == {Skill.IMAGE}
    assert described.prompt_tokens > TOKENS_PER_MEDIUM


def test_recording_needs_a_model_with_audio_input() -> None:
    payload = _chat()
    payload.messages.add(role=chat_pb2.ROLE_USER).content.add().audio.media_type = "audio/wav"
    assert describe(payload, salt="t").skills == {Skill.AUDIO}


def test_tools_need_a_tool_calling_model_unless_tool_choice_is_none() -> None:
    payload = _chat("hi")
    payload.tools.add().function.name = "look"
    assert describe(payload, salt="t").skills == {Skill.TOOLS}
    payload.tool_choice.mode = chat_pb2.ToolChoice.MODE_NONE
    assert describe(payload, salt="t").skills == frozenset()


def test_schema_of_a_tool_is_part_of_the_prompt() -> None:
    """Regression: only its name and description counted, although engines read the schema too."""

    def with_schema(word: str) -> Description:
        payload = _chat("hi")
        schema = {"type": "object", "properties": {word: {"type": "string", "description": "x" * 4_000}}}
        payload.tools.add().function.CopyFrom(
            chat_pb2.FunctionTool(name="look", parameters=to_json_object(schema, "parameters"))
        )
        return describe(payload, salt="t")

    assert 1_000 <= with_schema("place").prompt_tokens <= 1_040
    assert with_schema("place").prefix_digests != with_schema("other").prefix_digests


def test_mesh_tools_are_those_of_the_agent() -> None:
    behaviour = agent_behaviour_pb2.AgentBehaviour(tools=["clock", "search"])
    assert describe(_chat("hi"), salt="t", behaviour=behaviour).tools == {"clock", "search"}
    assert describe(_chat("hi"), salt="t").tools == frozenset()


def test_maximum_output_counts_every_choice() -> None:
    payload = _chat("hi")
    assert describe(payload, salt="t").max_output_tokens is None
    payload.sampling.max_tokens = 100
    assert describe(payload, salt="t").max_output_tokens == 100
    payload.choice_count = 3
    assert describe(payload, salt="t").max_output_tokens == 300
    completion = completion_pb2.CompletionPayload(choice_count=2)
    completion.sampling.max_tokens = 10
    for _ in range(4):
        completion.prompts.add(text="x")
    assert describe(completion, salt="t").max_output_tokens == 80
    assert describe(embedding_pb2.EmbeddingPayload(), salt="t").max_output_tokens == 0


def test_prompts_with_a_common_prefix_share_its_digests() -> None:
    shared = "s" * (3 * PREFIX_ENDS[0])
    one, other = prefix_digests([shared, "a" * 5_000], "t"), prefix_digests([shared, "b" * 5_000], "t")
    assert one[:3] == other[:3]
    assert not set(one[3:]) & set(other[3:])


def test_chunking_of_a_prompt_does_not_change_its_digests() -> None:
    text = "abc" * 4_000
    assert prefix_digests([text], "t") == prefix_digests([text[:100], text[100:5_000], text[5_000:]], "t")


def test_same_prompt_of_two_tenants_has_different_digests() -> None:
    text = ["x" * 10_000]
    assert not set(prefix_digests(text, "acme\0")) & set(prefix_digests(text, "other\0"))


def test_short_prompt_has_no_digest_and_a_long_one_a_bounded_number() -> None:
    assert prefix_digests(["x" * (PREFIX_ENDS[0] - 1)], "t") == ()
    assert len(prefix_digests(["x" * 10_000_000], "t")) == len(PREFIX_ENDS)


def test_message_role_changes_the_digest() -> None:
    text = "x" * PREFIX_ENDS[0]
    said = _chat(text)
    answered = _chat(text)
    answered.messages[0].role = chat_pb2.ROLE_ASSISTANT
    assert describe(said, salt="t").prefix_digests != describe(answered, salt="t").prefix_digests


def test_sessions_of_two_tenants_are_distinct() -> None:
    assert affinity_key("s", "acme") == affinity_key("s", "acme")
    assert affinity_key("s", "acme") != affinity_key("s", "other")
    assert affinity_key("", "acme") == b""


def _with_arguments(arguments: dict[str, Any], **extra: Any) -> chat_pb2.ChatPayload:
    given = {"chat_template_kwargs": arguments, **extra}
    return chat_pb2.ChatPayload(extra_parameters=to_json_object(given, "extra"))


@pytest.mark.parametrize(
    ("modes", "why"),
    [
        ({ThinkingMode.DEFAULT, ThinkingMode.ENABLED}, "does not answer without thinking"),
        ({ThinkingMode.DEFAULT}, "has no setting for thinking"),
        ({ThinkingMode.DEFAULT, ThinkingMode.DISABLED}, ""),
        (frozenset(ThinkingMode), ""),
        (frozenset(), ""),
    ],
)
def test_effort_none_is_unsupported_by_a_model_that_always_thinks(modes: set[ThinkingMode], why: str) -> None:
    capabilities = Capabilities(thinking_modes=frozenset(modes))
    none = chat_pb2.ChatPayload(reasoning_effort=chat_pb2.REASONING_EFFORT_NONE)
    assert unfollowed_effort(none, capabilities) == why
    assert unfollowed_effort(chat_pb2.ChatPayload(reasoning_effort=chat_pb2.REASONING_EFFORT_LOW), capabilities) == ""
    assert unfollowed_effort(chat_pb2.ChatPayload(), capabilities) == ""
    none.thinking = True
    assert unfollowed_effort(none, capabilities) == "", "the request itself asks for thinking"


def test_thinking_field_takes_precedence_over_the_template_argument() -> None:
    assert describe(_chat("hi"), salt="t").thinking is ThinkingMode.DEFAULT
    assert describe(chat_pb2.ChatPayload(thinking=True), salt="t").thinking is ThinkingMode.ENABLED
    assert describe(chat_pb2.ChatPayload(thinking=False), salt="t").thinking is ThinkingMode.DISABLED
    by_argument = _with_arguments({"enable_thinking": True, "x": 1})
    assert describe(by_argument, salt="t").thinking is ThinkingMode.ENABLED
    by_argument.thinking = False
    assert describe(by_argument, salt="t").thinking is ThinkingMode.DISABLED
    wrong = _with_arguments({"enable_thinking": "yes"})
    assert describe(wrong, salt="t").thinking is ThinkingMode.DEFAULT, "the engine's parameters refuse it"


def test_effort_does_not_set_the_thinking_mode() -> None:
    payload = chat_pb2.ChatPayload(reasoning_effort=chat_pb2.REASONING_EFFORT_HIGH)
    assert describe(payload, salt="t").thinking is ThinkingMode.DEFAULT


TRANSLATES = Capabilities(source_languages=("nl", "pt-BR"), target_languages=("en",))


@pytest.mark.parametrize(
    ("codes", "words"),
    [
        ({"source_lang_code": "nl", "target_lang_code": "en"}, ""),
        ({"source_lang_code": "PT_br", "target_lang_code": "EN"}, ""),
        ({"source_lang_code": "auto", "target_lang_code": "en"}, ""),
        ({"target_lang_code": "de"}, "does not translate into de"),
        ({"source_lang_code": "xx", "target_lang_code": "en"}, "does not translate from xx"),
        ({}, ""),
    ],
)
def test_translation_needs_languages_supported_by_the_model(codes: dict[str, str], words: str) -> None:
    assert untaken_words_of(_with_arguments(codes), TRANSLATES) == words
    assert untaken_words_of(_with_arguments({}, **codes), TRANSLATES) == words
    assert untaken_words_of(_with_arguments(codes), UNKNOWN) == ""
    assert names_languages(_with_arguments(codes)) is bool(codes)


def test_token_count_of_a_chat_needs_the_skills_of_the_chat() -> None:
    payload = tokenize_pb2.TokenizePayload(chat=_chat("what is this?"))
    payload.chat.messages[0].content.add().image.media_type = "image/png"
    assert describe(payload, salt="t").skills == {Skill.IMAGE}
    assert describe(tokenize_pb2.TokenizePayload(text="hi"), salt="t").skills == frozenset()
