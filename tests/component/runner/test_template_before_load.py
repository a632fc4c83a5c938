"""Before llama-server is given a model file, its chat templates have been looked at."""

from pathlib import Path

import pytest
from kit.engines import fake_engine
from kit.failures import fails
from kit.own_children import own_children
from kit.tiny_gguf import write_gguf

from runner_svc.templates.sandbox import check_before_load, read_templates
from weft.kernel.errors.error_tree import WeftError
from weft.kernel.errors.reasons import Reason

HOSTILE = "{{ 'a' * 2000000000 }}"


async def _load_failure(model: Path, override: Path | None = None) -> Reason:
    backend = fake_engine(path=model, chat_template_path=override)
    with pytest.raises(WeftError) as failed:
        await backend.start()
    assert not backend.log_lines(10), "the engine was started"
    assert not own_children(recursive=True)
    return failed.value.reason


async def test_hostile_template_fails_the_load_and_no_engine_starts(tmp_path: Path) -> None:
    assert await _load_failure(write_gguf(tmp_path / "m.gguf", HOSTILE)) is Reason.TEMPLATE_FAILED


async def test_hostile_tool_template_fails_the_load(tmp_path: Path) -> None:
    assert await _load_failure(write_gguf(tmp_path / "m.gguf", "fine", tool_use=HOSTILE)) is Reason.TEMPLATE_FAILED


async def test_hostile_override_fails_the_load_and_a_valid_one_replaces_a_hostile_template(tmp_path: Path) -> None:
    override = tmp_path / "template.jinja"
    override.write_text(HOSTILE)
    assert await _load_failure(write_gguf(tmp_path / "m.gguf"), override) is Reason.TEMPLATE_FAILED
    override.write_text("{{ messages[0].content }}")
    backend = fake_engine(path=write_gguf(tmp_path / "h.gguf", HOSTILE), chat_template_path=override)
    await backend.start()
    await backend.stop()


async def test_role_checking_template_and_non_gguf_file_pass_the_check(tmp_path: Path) -> None:
    strict = write_gguf(tmp_path / "m.gguf", "{{ raise_exception('no system role here') }}")
    other = tmp_path / "m.bin"
    other.write_bytes(b"another kind of file")
    for model in (strict, other, tmp_path / "not there", write_gguf(tmp_path / "n.gguf", None)):
        await check_before_load(model, None)


async def test_truncated_model_file_fails_the_load(tmp_path: Path) -> None:
    model = write_gguf(tmp_path / "m.gguf")
    model.write_bytes(model.read_bytes()[:-50])
    assert await _load_failure(model) is Reason.INVALID_ARGUMENT


async def test_override_must_be_text_of_bounded_length(tmp_path: Path) -> None:
    model, override = write_gguf(tmp_path / "m.gguf"), tmp_path / "template.jinja"
    for content in (b"\xff", b"x" * (1024 * 1024 + 1)):
        override.write_bytes(content)
        with fails(Reason.INVALID_ARGUMENT):
            await read_templates(model, override)
    with fails(Reason.CONNECT_FAILED):
        await check_before_load(model, tmp_path / "not there")
