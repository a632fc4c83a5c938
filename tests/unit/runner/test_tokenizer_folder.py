"""Chat templates and the first and last token of a model folder, the bytes of tokens, and what templates can."""

import json
import time
from pathlib import Path
from typing import Any

import pytest
from kit.failures import fails

from runner_svc.model_files.gguf import MAX_TEXT_BYTES
from runner_svc.model_files.tokenizer_folder import TokenizerFolder, read_tokenizer_folder
from runner_svc.policy.template_capabilities import capabilities_of_templates
from runner_svc.templates.sandbox import read_templates
from weft.kernel.errors.error_tree import WeftError
from weft.kernel.errors.reasons import Reason
from weft.kernel.requests.capabilities import EVERY_MODE, UNKNOWN, ThinkingMode
from weft.kernel.requests.request_values import Skill
from weft_extensions.engines.engine_host.text_routes import TokenBytes


def _folder(path: Path, config: Any = None, **files: str) -> Path:
    if config is not None:
        (path / "tokenizer_config.json").write_text(config if isinstance(config, str) else json.dumps(config))
    for name, text in files.items():
        (path / f"{name}.jinja").write_text(text)
    return path


def test_configuration_template_is_read_with_its_tokens(tmp_path: Path) -> None:
    config = {"chat_template": "usual", "bos_token": {"content": "<s>"}, "eos_token": "</s>"}
    assert read_tokenizer_folder(_folder(tmp_path, config)) == TokenizerFolder(
        chat_template="usual", bos_token="<s>", eos_token="</s>"
    )


def test_named_templates_are_read_and_a_file_precedes_the_configuration(tmp_path: Path) -> None:
    templates = [{"name": "default", "template": "old"}, {"name": "tool_use", "template": "tools"}, {"name": "x"}]
    folder = _folder(tmp_path, {"chat_template": templates, "bos_token": None}, chat_template="file")
    further = tmp_path / "additional_chat_templates"
    further.mkdir()
    _folder(further, rag="rag")
    found = read_tokenizer_folder(folder)
    assert (found.chat_template, dict(found.named_templates)) == ("file", {"tool_use": "tools", "rag": "rag"})
    assert found.bos_token == ""


async def test_folder_without_template_files_has_none_and_an_override_is_used(tmp_path: Path) -> None:
    assert (await read_templates(_folder(tmp_path), None)).usual is None
    override = tmp_path / "other.txt"
    override.write_text("override")
    templates = await read_templates(_folder(tmp_path, {"eos_token": "</s>"}), override)
    assert (templates.usual, templates.eos_token) == ("override", "</s>")


@pytest.mark.parametrize("config", ["{", "[" * 100_000, "\x00"])
def test_non_json_configuration_is_refused(tmp_path: Path, config: str) -> None:
    with fails(Reason.INVALID_ARGUMENT, match=r"tokenizer_config\.json is not valid JSON"):
        read_tokenizer_folder(_folder(tmp_path, config))


@pytest.mark.parametrize("config", ["[1]", "null", "{}"])
def test_configuration_of_another_shape_is_empty(tmp_path: Path, config: str) -> None:
    assert read_tokenizer_folder(_folder(tmp_path, config)) == TokenizerFolder()


def test_oversized_template_is_refused(tmp_path: Path) -> None:
    with pytest.raises(WeftError, match=f"chat_template.jinja is over {MAX_TEXT_BYTES} bytes"):
        read_tokenizer_folder(_folder(tmp_path, chat_template="x" * (MAX_TEXT_BYTES + 1)))
    (tmp_path / "chat_template.jinja").write_bytes(b"\xff")
    with pytest.raises(WeftError, match="is not UTF-8 text"):
        read_tokenizer_folder(tmp_path)


BYTE_LEVEL = {"decoder": {"type": "ByteLevel"}, "added_tokens": [{"content": "<|im_end|>"}, {"content": "Ġadded"}]}
SENTENCES = {
    "decoder": {"type": "Sequence", "decoders": [{"type": "Replace"}, {"type": "ByteFallback"}, {"type": "Fuse"}]},
    "added_tokens": [{"content": "<bos>"}],
}


@pytest.mark.parametrize(
    ("tokenizer", "token", "expected"),
    [
        (BYTE_LEVEL, "Hello", b"Hello"),
        (BYTE_LEVEL, "Ġthe", b" the"),
        (BYTE_LEVEL, "Ċ", b"\n"),
        (BYTE_LEVEL, "Ã¤", "ä".encode()),
        (BYTE_LEVEL, "<|im_end|>", b"<|im_end|>"),
        (BYTE_LEVEL, "Ġadded", "Ġadded".encode()),
        (BYTE_LEVEL, "☃", "☃".encode()),
        ({"decoder": {"type": "Sequence", "decoders": [{"type": "ByteLevel"}]}}, "Ġ", b" "),
        (SENTENCES, "▁the", b" the"),
        (SENTENCES, "<0xE2>", b"\xe2"),
        (SENTENCES, "<0xZZ>", b"<0xZZ>"),
        (SENTENCES, "ä", "ä".encode()),
        (SENTENCES, "<bos>", b"<bos>"),
        ({"decoder": None}, "Ġ", "Ġ".encode()),
    ],
)
def test_token_is_decoded_as_its_tokenizer_defines(tokenizer: dict[str, object], token: str, expected: bytes) -> None:
    assert TokenBytes(tokenizer).of(token) == expected


def test_every_byte_has_one_letter_in_byte_level_tokenizers() -> None:
    alphabet = TokenBytes(BYTE_LEVEL)._bytes
    assert sorted(alphabet.values()) == list(range(256))


DEFAULT, ENABLED, DISABLED = ThinkingMode.DEFAULT, ThinkingMode.ENABLED, ThinkingMode.DISABLED
PLAIN = "{% for m in messages %}{{ m.content }}{% endfor %}"
MAX_SECONDS = 5.0


@pytest.mark.parametrize(
    ("template", "modes"),
    [
        (PLAIN, {DEFAULT, DISABLED}),
        (
            PLAIN + "{%- if enable_thinking is defined and enable_thinking is false %}<think></think>{%- endif %}",
            EVERY_MODE,
        ),
        (PLAIN + "{% if not thinking is defined %}{% set thinking = false %}{% endif %}<think>", {DEFAULT}),
        (PLAIN + "{{ '<think>\\n' }}", {DEFAULT, ENABLED}),
        (PLAIN + "{% if message.thinking %}<|channel|>analysis{% endif %}{{ reasoning_effort }}", {DEFAULT, ENABLED}),
        (PLAIN + "{# enable_thinking: <think> #}", {DEFAULT, DISABLED}),
        (PLAIN + "{{ rethinking_tools }}", {DEFAULT, DISABLED}),
    ],
)
def test_thinking_is_configurable_if_the_template_reads_the_switch(template: str, modes: set[ThinkingMode]) -> None:
    assert capabilities_of_templates([template]).thinking_modes == modes


@pytest.mark.parametrize(
    ("templates", "has"),
    [
        ([PLAIN], False),
        ([PLAIN + "{% if tools %}{{ tools }}{% endif %}"], True),
        ([PLAIN + "{# tools #}"], False),
        ([PLAIN, PLAIN + "{{ tools }}"], True),
        ([PLAIN + "{{ my_tools }}"], False),
    ],
)
def test_tools_are_supported_if_the_template_reads_them(templates: list[str], has: bool) -> None:
    found = capabilities_of_templates(templates)
    assert (Skill.TOOLS in found.skills, Skill.TOOLS in found.lacking) == (has, not has)


def test_abilities_are_unknown_without_a_template() -> None:
    assert capabilities_of_templates([]) == UNKNOWN


@pytest.mark.parametrize("unit", ["{#", "{% if ", "{% if thinking", "{%- set x", "tools ", "<"])
def test_malicious_template_of_maximum_length_is_read_in_time(unit: str) -> None:
    began = time.process_time()
    capabilities_of_templates([unit * (2**20 // len(unit))])
    assert time.process_time() - began < MAX_SECONDS
