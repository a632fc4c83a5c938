"""Requests to models that translate, with a chat template of the form that TranslateGemma has, in the real sandbox."""

from collections.abc import AsyncGenerator
from typing import Any

import pytest
import pytest_asyncio
from kit.failures import fails
from kit.translation_template import TRANSLATION_TEMPLATE

from runner_svc.openai_upstream.openai_request import PreparedBody
from runner_svc.policy.parameters import ParameterProfile
from runner_svc.runtimes.llama_server.runtime import PARAMETERS as LLAMA_SERVER
from runner_svc.templates.rendered_request import prepare, rendered_translation
from runner_svc.templates.sandbox import ModelTemplates, TemplateSandbox
from weft.api.common.v1 import chat_pb2
from weft.kernel.errors.error_tree import FieldError
from weft_extensions.engines.ctranslate2.runtime import PARAMETERS
from weft_extensions.engines.llama_cpp_python.runtime import PARAMETERS as LLAMA_CPP_PYTHON

TRANSLATES = ModelTemplates(usual=TRANSLATION_TEMPLATE, bos_token="<bos>", eos_token="<eos>")
TALKS = ModelTemplates(usual="{{ messages[-1].content }}", eos_token="<eos>")
USER, SYSTEM, ASSISTANT = chat_pb2.ROLE_USER, chat_pb2.ROLE_SYSTEM, chat_pb2.ROLE_ASSISTANT


@pytest_asyncio.fixture
async def sandbox() -> AsyncGenerator[TemplateSandbox]:
    async with TemplateSandbox() as made:
        yield made


def _chat(*messages: "tuple[chat_pb2.Role.ValueType, str]", **languages: Any) -> chat_pb2.ChatPayload:
    payload = chat_pb2.ChatPayload()
    for role, text in messages or ((USER, "Goedemorgen."),):
        payload.messages.add(role=role, content=[chat_pb2.ContentPart(text=text)])
    for name, value in languages.items():
        field = payload.extra_parameters.fields.add(name=name).value
        if isinstance(value, dict):
            for inner, code in value.items():
                field.object_value.fields.add(name=inner).value.string_value = code
        elif isinstance(value, str):
            field.string_value = value
        else:
            field.integer_value = value
    return payload


async def _prepared(
    sandbox: TemplateSandbox, payload: chat_pb2.ChatPayload, templates: ModelTemplates = TRANSLATES, **profile: Any
) -> PreparedBody:
    given = {"engine": PARAMETERS, **profile}
    return await prepare(payload, templates, ParameterProfile(**given), sandbox.render)


@pytest.mark.parametrize("engine", [PARAMETERS, LLAMA_CPP_PYTHON])
async def test_languages_reach_the_template_from_either_field(sandbox: TemplateSandbox, engine: Any) -> None:
    codes = {"source_lang_code": "nl", "target_lang_code": "pt-BR"}
    for languages in (codes, {"chat_template_kwargs": codes}):
        prepared = await _prepared(sandbox, _chat(**languages), engine=engine)
        assert prepared.body["prompt"] == ["<bos>Dutch to Brazilian Portuguese: Goedemorgen."]
        assert prepared.warnings == []


@pytest.mark.parametrize("source", [None, "auto", "mixed"])
async def test_unknown_source_language_falls_back_to_the_several_languages_prompt(
    sandbox: TemplateSandbox, source: str | None
) -> None:
    given = {} if source is None else {"source_lang_code": source}
    for target, named in (("nl", "English to Dutch"), ("en", "French to English")):
        prompt = str((await _prepared(sandbox, _chat(target_lang_code=target, **given))).body["prompt"][0])
        assert prompt.startswith(f"<bos>{named}: The text may be in several languages.")
        assert prompt.endswith("Goedemorgen.")


@pytest.mark.parametrize(
    ("payload", "field", "words"),
    [
        (_chat(), "target_lang_code", "is required"),
        (_chat(source_lang_code="nl"), "target_lang_code", "is required"),
        (_chat(target_lang_code="auto"), "target_lang_code", "must be one language"),
        (_chat(target_lang_code="no code"), "target_lang_code", "must be the code of a language"),
        (_chat(target_lang_code=7), "target_lang_code", "must be the code of a language"),
        (_chat(target_lang_code="en", source_lang_code="x" * 30), "source_lang_code", "must be the code of a language"),
        (_chat(target_lang_code="de", source_lang_code="nl"), "messages", "the language is not known"),
        (
            _chat((SYSTEM, "Be formal."), (USER, "Hallo."), target_lang_code="en"),
            "messages[0]",
            "does not support instructions",
        ),
        (
            _chat((USER, "Hallo."), (ASSISTANT, "Hello."), (USER, "Dag."), target_lang_code="en"),
            "messages",
            "must be one message of the user",
        ),
    ],
)
async def test_untranslatable_request_is_refused_with_its_field(
    sandbox: TemplateSandbox, payload: chat_pb2.ChatPayload, field: str, words: str
) -> None:
    with fails(None, words, field=field):
        await _prepared(sandbox, payload)


async def test_tools_are_refused_and_other_template_arguments_are_warned_about(sandbox: TemplateSandbox) -> None:
    with_tool = _chat(target_lang_code="en", source_lang_code="nl")
    with_tool.tools.add(function=chat_pb2.FunctionTool(name="f"))
    with pytest.raises(FieldError, match="does not support tools"):
        await _prepared(sandbox, with_tool)
    payload = _chat(chat_template_kwargs={"target_lang_code": "en", "source_lang_code": "nl", "tone": "formal"})
    prepared = await _prepared(sandbox, payload)
    assert [event.warning.field for event in prepared.warnings] == ["chat_template_kwargs.tone"]


async def test_non_translation_model_warns_that_the_languages_were_unused(sandbox: TemplateSandbox) -> None:
    codes = {"source_lang_code": "nl", "target_lang_code": "en"}
    for languages, fields in (
        (codes, ["source_lang_code", "target_lang_code"]),
        (
            {"chat_template_kwargs": codes},
            ["chat_template_kwargs.source_lang_code", "chat_template_kwargs.target_lang_code"],
        ),
    ):
        prepared = await _prepared(sandbox, _chat(**languages), TALKS)
        assert prepared.body["prompt"] == ["Goedemorgen."]
        assert [event.warning.field for event in prepared.warnings] == fields


async def test_rendered_translation_is_one_message_without_the_languages(sandbox: TemplateSandbox) -> None:
    """For llama.cpp's server, which gets a template that writes a message as it is."""
    payload = _chat(chat_template_kwargs={"target_lang_code": "en", "source_lang_code": "nl"}, top_a="1")
    sent = await rendered_translation(payload, TRANSLATES, ParameterProfile(engine=LLAMA_SERVER), sandbox.render)
    texts = [part.text for message in sent.messages for part in message.content]
    assert texts == ["<bos>Dutch to English: Goedemorgen."]
    assert [field.name for field in sent.extra_parameters.fields] == ["top_a"]
