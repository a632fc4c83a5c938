"""Chat templates and the first and last token of a model folder."""

import json
from pathlib import Path
from typing import Any

import pytest
from kit.failures import fails

from runner_svc.model_files.gguf import MAX_TEXT_BYTES
from runner_svc.model_files.tokenizer_folder import TokenizerFolder, read_tokenizer_folder
from runner_svc.templates.sandbox import read_templates
from weft.kernel.errors import WeftError
from weft.kernel.reasons import Reason


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
