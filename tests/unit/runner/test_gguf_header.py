"""The head of a model file: what is wanted is found, and no file can do more than be refused."""

import struct
import tracemalloc
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from runner_svc import gguf_header
from runner_svc.gguf_header import GgufHeader, is_gguf, read_gguf_header
from weft.host.demo import demo_model_path
from weft.kernel.errors import WeftError
from weft.kernel.reasons import Reason

UINT32, STRING, ARRAY, UINT64 = 4, 8, 9, 10
HUGE = 2**64 - 1


def _text(text: str) -> bytes:
    raw = text.encode()
    return struct.pack("<Q", len(raw)) + raw


def _entry(key: str, kind: int, value: bytes) -> bytes:
    return _text(key) + struct.pack("<I", kind) + value


def _strings(key: str, items: Sequence[str]) -> bytes:
    return _entry(key, ARRAY, struct.pack("<IQ", STRING, len(items)) + b"".join(map(_text, items)))


def _tensor(name: str, dimensions: Sequence[int], kind: int, offset: int) -> bytes:
    layout = struct.pack(f"<I{len(dimensions)}Q", len(dimensions), *dimensions)
    return _text(name) + layout + struct.pack("<IQ", kind, offset)


def _file(
    entries: Sequence[bytes] = (),
    tensors: Sequence[bytes] = (),
    *,
    version: int = 3,
    counts: tuple[int, int] | None = None,
    data: bytes = b"",
) -> bytes:
    tensor_count, entry_count = counts or (len(tensors), len(entries))
    head = b"GGUF" + struct.pack("<IQQ", version, tensor_count, entry_count) + b"".join(entries) + b"".join(tensors)
    return head + bytes(-len(head) % 32) + data


ENTRIES = (
    # Before the tokens, so that they have to be looked up afterwards.
    _entry("tokenizer.ggml.eos_token_id", UINT32, struct.pack("<I", 2)),
    _entry("general.architecture", STRING, _text("llama")),
    _entry("llama.context_length", UINT32, struct.pack("<I", 4096)),
    _strings("tokenizer.ggml.tokens", ["<unk>", "<s>", "</s>", "a"]),
    _entry("tokenizer.ggml.scores", ARRAY, struct.pack("<IQ4f", 6, 4, 0, 0, 0, 0)),
    _entry("tokenizer.ggml.bos_token_id", UINT32, struct.pack("<I", 1)),
    _entry("tokenizer.chat_template", STRING, _text("{{ bos_token }}")),
    _entry("tokenizer.chat_template.tool_use", STRING, _text("{{ tools }}")),
    _entry("general.name", STRING, _text("x" * 100)),
)
TENSORS = (_tensor("a", (64, 2), 0, 0), _tensor("b", (64,), 3, 512))
GOOD = _file(ENTRIES, TENSORS, data=bytes(512 + 40))

Write = Callable[[bytes], Path]


@pytest.fixture(scope="module")
def write(tmp_path_factory: pytest.TempPathFactory) -> Write:
    path = tmp_path_factory.mktemp("gguf") / "model.gguf"

    def written(content: bytes) -> Path:
        path.write_bytes(content)
        return path

    return written


def _refusal(path: Path) -> WeftError:
    with pytest.raises(WeftError) as refused:
        read_gguf_header(path)
    assert refused.value.reason is Reason.INVALID_ARGUMENT
    assert str(path) not in refused.value.message
    return refused.value


@pytest.mark.parametrize("version", [2, 3])
def test_what_is_wanted_is_found(write: Write, version: int) -> None:
    header = read_gguf_header(write(_file(ENTRIES, TENSORS, version=version, data=bytes(552))))
    assert header.architecture == "llama"
    assert header.context_tokens == 4096
    assert header.chat_template == "{{ bos_token }}"
    assert header.named_templates == {"tool_use": "{{ tools }}"}
    assert header.templates == ("{{ bos_token }}", "{{ tools }}")
    assert (header.bos_token, header.eos_token) == ("<s>", "</s>")
    assert header.tensor_count == 2


def test_the_demo_model_is_read() -> None:
    header = read_gguf_header(demo_model_path())
    assert (header.architecture, header.context_tokens, header.tensor_count) == ("llama", 8192, 272)
    assert (header.bos_token, header.eos_token) == ("<|im_start|>", "<|im_end|>")
    assert header.chat_template is not None
    assert "add_generation_prompt" in header.chat_template


def test_a_file_without_anything_that_is_wanted_is_fine(write: Write) -> None:
    header = read_gguf_header(write(_file()))
    assert (header.architecture, header.chat_template, header.templates, header.eos_token) == ("", None, (), "")


def test_a_file_says_what_it_is(write: Write) -> None:
    assert is_gguf(write(GOOD))
    assert not is_gguf(write(b"GGM"))


HOSTILE: dict[str, bytes] = {
    "another magic": b"GGML" + GOOD[4:],
    "an empty file": b"",
    "version 1, with short lengths": _file(version=1),
    "version 2^32-1, or big-endian": _file(version=2**32 - 1),
    "2^63 entries": _file(counts=(0, 2**63)),
    "2^63 tensors": _file(counts=(2**63, 0)),
    "more entries than it has": _file(counts=(0, 100)),
    "a key of 2^64-1 bytes": _file([struct.pack("<Q", HUGE)]),
    "a key of a gigabyte": _file([struct.pack("<Q", 2**30)]),
    "a key that is not UTF-8": _file([struct.pack("<Q", 2) + b"\xff\xfe" + struct.pack("<II", UINT32, 1)]),
    "a value of 2^64-1 bytes": _file([_entry("general.name", STRING, struct.pack("<Q", HUGE))]),
    "an unknown type": _file([_entry("a", 255, b"")]),
    "an array of an unknown type": _file([_entry("a", ARRAY, struct.pack("<IQ", 255, 1))]),
    "an array of arrays": _file([_entry("a", ARRAY, struct.pack("<IQ", ARRAY, 1))]),
    "2^63 numbers": _file([_entry("a", ARRAY, struct.pack("<IQ", UINT64, 2**63))]),
    "2^63 strings": _file([_entry("a", ARRAY, struct.pack("<IQ", STRING, 2**63))]),
    "a string in an array of 2^64-1 bytes": _file([_entry("a", ARRAY, struct.pack("<IQQ", STRING, 1, HUGE))]),
    "an entry twice": _file([ENTRIES[6], ENTRIES[6]]),
    "a template that is too large": _file([_entry("tokenizer.chat_template", STRING, _text("x" * (2**20 + 1)))]),
    "a template that is a number": _file([_entry("tokenizer.chat_template", UINT32, struct.pack("<I", 1))]),
    "too many templates": _file(
        [_entry(f"tokenizer.chat_template.{number}", STRING, _text("x")) for number in range(17)]
    ),
    "a tensor beyond the end": _file(ENTRIES, TENSORS, data=bytes(551)),
    "a tensor at 2^64-1": _file(tensors=[_tensor("a", (1,), 0, HUGE)]),
    "a tensor of 2^63 times 2^63 values": _file(tensors=[_tensor("a", (2**63, 2**63), 0, 0)]),
    "a tensor of 2^32 dimensions": _file(tensors=[_text("a") + struct.pack("<I", 2**32 - 1)]),
    "a tensor of an unknown type beyond the end": _file(tensors=[_tensor("a", (1,), 255, 4096)]),
    "an alignment of 0": _file([_entry("general.alignment", UINT32, bytes(4))]),
}


@pytest.mark.parametrize("content", HOSTILE.values(), ids=HOSTILE.keys())
def test_a_hostile_file_is_refused_with_words(write: Write, content: bytes) -> None:
    assert "GGUF" in _refusal(write(content)).message


def test_a_file_that_is_cut_anywhere_in_its_head_is_refused(write: Write) -> None:
    head = len(GOOD) - 552
    for length in range(head):
        _refusal(write(GOOD[:length]))


def test_the_strings_that_are_stepped_over_are_counted(write: Write, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gguf_header, "MAX_STEPS", 3)
    assert "more items" in _refusal(write(GOOD)).message


@settings(max_examples=300, deadline=None)
@given(
    changes=st.lists(
        st.tuples(st.integers(0, len(GOOD) - 553), st.binary(min_size=1, max_size=8)), min_size=1, max_size=4
    ),
    length=st.one_of(st.none(), st.integers(0, len(GOOD))),
)
@example(changes=[(0, b"G")], length=None)
def test_a_corrupted_file_is_read_or_refused_and_nothing_else(
    write: Write, changes: list[tuple[int, bytes]], length: int | None
) -> None:
    content = bytearray(GOOD)
    for place, piece in changes:
        content[place : place + len(piece)] = piece
    outcome = _outcome(write(bytes(content[:length])))
    if isinstance(outcome, WeftError):
        assert outcome.reason is Reason.INVALID_ARGUMENT
    else:
        assert len(outcome.chat_template or "") <= gguf_header.MAX_TEXT_BYTES


def _outcome(path: Path) -> GgufHeader | WeftError:
    try:
        return read_gguf_header(path)
    except WeftError as error:
        return error


def test_a_crowd_of_named_templates_is_refused_before_it_is_kept(write: Write) -> None:
    megabyte = "x" * (1024 * 1024)
    crowd = [_entry(f"tokenizer.chat_template.t{n}", STRING, _text(megabyte)) for n in range(40)]
    path = write(_file(crowd))
    del crowd
    tracemalloc.start()
    try:
        with pytest.raises(WeftError, match="more than 16 chat templates"):
            read_gguf_header(path)
        assert tracemalloc.get_traced_memory()[1] < 24 * 1024 * 1024
    finally:
        tracemalloc.stop()


def test_a_named_template_that_is_a_number_is_none(write: Write) -> None:
    entry = _entry("tokenizer.chat_template.seven", UINT32, struct.pack("<I", 7))
    assert read_gguf_header(write(_file([entry]))).named_templates == {}
