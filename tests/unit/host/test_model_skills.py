"""What the configuration and the files of a model show of its capabilities reaches the mesh."""

import json
from pathlib import Path
from typing import Any

import pytest
from kit.tiny_gguf import write_gguf, write_projector

from runner_svc.instance.instance_settings import ServedModel
from runner_svc.runner_settings import RunnerSettings
from weft.kernel.errors.error_tree import FieldError
from weft.kernel.requests.capabilities import EVERY_MODE, UNKNOWN, Capabilities, ThinkingMode, known_capabilities
from weft.kernel.requests.request_values import Skill
from weft_app.compose.demo import demo_model_path
from weft_app.compose.served_models import served_model
from weft_app.config.loader import parse_section
from weft_app.config.runners import ConfiguredRunner

MEDIA = {Skill.IMAGE, Skill.AUDIO}


def section(runtime: str = "llama_server", **fields: Any) -> RunnerSettings:
    attached = runtime.startswith("openai")
    place = {"url": "http://127.0.0.1:1/v1"} if attached else {"path": "m.gguf"}
    model = {"name": "m", **place, **fields}
    return parse_section(ConfiguredRunner, {"name": "r", "runtime": runtime, "command": ["server"], "models": [model]})


def served(runner: RunnerSettings) -> ServedModel:
    return served_model(runner, runner.models[0], 5.0)


def known(runner: RunnerSettings) -> Capabilities:
    """Returns what is known before the first load."""
    model = served(runner)
    return known_capabilities(declared=model.declared_capabilities, engine=UNKNOWN, files=model.capabilities)


def test_undeclared_skill_is_unknown() -> None:
    assert served(section()).skills == frozenset()
    assert served(section(category="vision")).skills == frozenset()
    assert known(section("openai_http")) == UNKNOWN
    file_is_missing = known(section())
    assert file_is_missing.thinking_modes == frozenset()
    assert Skill.TOOLS not in file_is_missing.skills | file_is_missing.lacking


@pytest.mark.parametrize(
    ("runtime", "fields", "category"),
    [
        ("openai_http", {"operations": ["image"]}, "image"),
        ("openai_http", {"operations": ["transcription"]}, "audio"),
        ("openai_http", {"operations": ["image"], "category": "text"}, "text"),
        ("llama_server", {}, "text"),
        ("llama_server", {"category": "vision"}, "vision"),
    ],
)
def test_hibernation_category_follows_the_model_type_unless_configured(
    runtime: str, fields: dict[str, Any], category: str
) -> None:
    assert served(section(runtime, **fields)).hibernation.category == category


def test_server_without_a_projector_accepts_no_images_and_no_audio() -> None:
    assert known(section()).lacking == MEDIA
    assert known(section("llama_cpp_python", slots=1)).lacking == MEDIA
    assert known(section(extra_arguments=("-hf", "org/model"))).lacking == frozenset(), "it may find a projector"


def test_server_with_a_projector_accepts_images() -> None:
    for flags in (("--mmproj", "eyes.gguf"), ("--mmproj=eyes.gguf",), ("-mm", "eyes.gguf")):
        found = known(section(extra_arguments=flags))
        assert found.skills == {Skill.TEXT, Skill.IMAGE}
        assert found.lacking == frozenset(), "of audio and tools nothing is known"
    # The other engine does not know the argument.
    assert known(section("llama_cpp_python", slots=1, extra_arguments=("--mmproj", "eyes.gguf"))).lacking == MEDIA


@pytest.mark.parametrize(
    ("vision", "audio", "takes", "lacks"),
    [
        (True, None, {Skill.IMAGE}, {Skill.AUDIO}),
        (True, True, MEDIA, set()),
        (None, True, {Skill.AUDIO}, {Skill.IMAGE}),
        (False, True, {Skill.AUDIO}, {Skill.IMAGE}),
        (None, None, {Skill.IMAGE}, set()),
    ],
)
def test_projector_header_declares_what_it_encodes(
    vision: bool | None, audio: bool | None, takes: set[Skill], lacks: set[Skill], tmp_path: Path
) -> None:
    projector = write_projector(tmp_path / "mmproj.gguf", vision=vision, audio=audio)
    found = known(section(mmproj_path=str(projector)))
    assert found.skills == {Skill.TEXT, *takes}
    assert found.lacking == lacks


def test_chat_template_of_a_file_declares_tools_and_thinking(tmp_path: Path) -> None:
    model = write_gguf(tmp_path / "m.gguf")
    found = known(section(path=str(model)))
    assert (Skill.TOOLS in found.skills, found.thinking_modes) == (True, EVERY_MODE)
    plain = tmp_path / "plain.jinja"
    plain.write_text("{% for m in messages %}{{ m.content }}{% endfor %}{# tools, enable_thinking #}")
    overridden = known(section(path=str(model), chat_template_path=str(plain)))
    assert Skill.TOOLS in overridden.lacking
    assert overridden.thinking_modes == {ThinkingMode.DEFAULT, ThinkingMode.DISABLED}
    built_in = known(section(path=str(model), extra_arguments=("--chat-template", "chatml")))
    assert built_in.thinking_modes == frozenset(), "the server's own template is known once it runs"


@pytest.mark.parametrize("runtime", ["ctranslate2", "exllamav3"])
@pytest.mark.parametrize("place", ["chat_template.jinja", "tokenizer_config.json"])
def test_chat_template_in_a_folder_declares_tools_and_thinking_before_the_first_load(
    runtime: str, place: str, tmp_path: Path
) -> None:
    template = "{% if tools %}{{ tools }}{% endif %}<think>{{ messages[0].content }}"
    (tmp_path / place).write_text(template if place.endswith("jinja") else json.dumps({"chat_template": template}))
    found = known(section(runtime, path=str(tmp_path)))
    assert found.skills == {Skill.TEXT, Skill.TOOLS}
    assert found.lacking == MEDIA
    assert found.thinking_modes == {ThinkingMode.DEFAULT, ThinkingMode.ENABLED}
    plain = tmp_path / "plain.jinja"
    plain.write_text("{{ messages[0].content }}")
    assert Skill.TOOLS in known(section(runtime, path=str(tmp_path), chat_template_path=str(plain))).lacking


def test_folder_with_an_unreadable_template_declares_nothing(tmp_path: Path) -> None:
    (tmp_path / "tokenizer_config.json").write_text("{")
    found = known(section("ctranslate2", path=str(tmp_path)))
    assert found == Capabilities(skills=frozenset({Skill.TEXT}), lacking=frozenset(MEDIA))


def test_demo_model_accepts_text_only() -> None:
    found = known(section(path=str(demo_model_path())))
    assert found.skills == {Skill.TEXT}
    assert found.lacking == {Skill.IMAGE, Skill.AUDIO, Skill.TOOLS}
    assert found.thinking_modes == {ThinkingMode.DEFAULT, ThinkingMode.DISABLED}


def test_configured_skills_take_precedence() -> None:
    said = known(section(skills=("text", "audio"), extra_arguments=("--mmproj", "ears.gguf")))
    assert said.skills == {Skill.TEXT, Skill.AUDIO}
    assert said.lacking == {Skill.IMAGE, Skill.TOOLS}
    assert known(section("openai_http", skills=("text", "image", "audio", "tools"))).skills == frozenset(Skill)
    thinks = known(section(path=str(demo_model_path()), thinking_modes=("default", "enabled")))
    assert thinks.thinking_modes == {ThinkingMode.DEFAULT, ThinkingMode.ENABLED}


def test_unknown_skill_is_refused() -> None:
    with pytest.raises(FieldError, match="skills"):
        section(skills=("telepathy",))
    with pytest.raises(FieldError, match="thinking_modes"):
        section(thinking_modes=("deeply",))


def test_configured_languages_are_those_of_the_model() -> None:
    found = known(section("openai_http", source_languages=("nl", "pt-BR"), target_languages=("en",)))
    assert (found.source_languages, found.target_languages) == (("nl", "pt-BR"), ("en",))
    with pytest.raises(FieldError, match="source_languages"):
        section(source_languages=("two words",))
