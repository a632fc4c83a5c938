"""The header of a GGUF file: its facts are found, and malformed files are refused."""

import struct
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import pytest
from kit.failures import fails
from kit.gguf_bytes import ARRAY, STRING, UINT32, UINT64, entry, gguf, raw_entry, tensor, text

from runner_svc.model_files.gguf import (
    MAX_ENTRIES,
    MAX_TENSORS,
    GgufHeader,
    is_gguf,
    model_parts,
    read_gguf_header,
    read_gguf_model,
)
from weft.kernel.errors.error_tree import WeftError
from weft.kernel.errors.reasons import Reason
from weft_app.compose.demo import demo_model_path

HUGE = 2**64 - 1


ENTRIES = (
    # Before the tokens, so that they have to be looked up afterwards.
    entry("tokenizer.ggml.eos_token_id", 2),
    entry("general.architecture", "llama"),
    entry("llama.context_length", 4096),
    entry("tokenizer.ggml.tokens", ["<unk>", "<s>", "</s>", "a"]),
    entry("tokenizer.ggml.scores", [0.0] * 4),
    entry("tokenizer.ggml.bos_token_id", 1),
    entry("tokenizer.chat_template", "{{ bos_token }}"),
    entry("tokenizer.chat_template.tool_use", "{{ tools }}"),
    entry("general.name", "x" * 100),
)
TENSORS = (tensor("a", (64, 2), 0, 0), tensor("b", (64,), 3, 512))
GOOD = gguf(ENTRIES, TENSORS, data=bytes(512 + 40))

Write = Callable[[bytes], Path]


@pytest.fixture(scope="module")
def write(tmp_path_factory: pytest.TempPathFactory) -> Write:
    path = tmp_path_factory.mktemp("gguf") / "model.gguf"

    def written(content: bytes) -> Path:
        path.write_bytes(content)
        return path

    return written


def _refusal(path: Path) -> WeftError:
    with fails(Reason.INVALID_ARGUMENT) as refused:
        read_gguf_header(path)
    assert str(path) not in refused.value.message
    return refused.value


@pytest.mark.parametrize("version", [2, 3])
def test_requested_entries_are_found(write: Write, version: int) -> None:
    header = read_gguf_header(write(gguf(ENTRIES, TENSORS, version=version, data=bytes(552))))
    assert header.architecture == "llama"
    assert header.context_tokens == 4096
    assert header.chat_template == "{{ bos_token }}"
    assert header.named_templates == {"tool_use": "{{ tools }}"}
    assert header.templates == ("{{ bos_token }}", "{{ tools }}")
    assert (header.bos_token, header.eos_token) == ("<s>", "</s>")
    assert header.tensor_count == 2


def test_demo_model_header_is_read() -> None:
    header = read_gguf_header(demo_model_path())
    assert (header.architecture, header.context_tokens, header.tensor_count) == ("llama", 8192, 272)
    assert (header.bos_token, header.eos_token) == ("<|im_start|>", "<|im_end|>")
    assert header.chat_template is not None
    assert "add_generation_prompt" in header.chat_template


def test_file_without_requested_entries_is_valid(write: Write) -> None:
    header = read_gguf_header(write(gguf()))
    assert (header.architecture, header.chat_template, header.templates, header.eos_token) == ("", None, (), "")


def test_file_metadata_is_read(write: Write) -> None:
    assert is_gguf(write(GOOD))
    assert not is_gguf(write(b"GGM"))


HOSTILE: dict[str, bytes] = {
    "another magic": b"GGML" + GOOD[4:],
    "an empty file": b"",
    "version 1, with short lengths": gguf(version=1),
    "version 2^32-1, or big-endian": gguf(version=2**32 - 1),
    "2^63 entries": gguf(counts=(0, 2**63)),
    "2^63 tensors": gguf(counts=(2**63, 0)),
    "more entries than it has": gguf(counts=(0, 100)),
    "a key of 2^64-1 bytes": gguf([struct.pack("<Q", HUGE)]),
    "a key of a gigabyte": gguf([struct.pack("<Q", 2**30)]),
    "a key that is not UTF-8": gguf([struct.pack("<Q", 2) + b"\xff\xfe" + struct.pack("<II", UINT32, 1)]),
    "a value of 2^64-1 bytes": gguf([raw_entry("general.name", STRING, struct.pack("<Q", HUGE))]),
    "an unknown type": gguf([raw_entry("a", 255, b"")]),
    "an array of an unknown type": gguf([raw_entry("a", ARRAY, struct.pack("<IQ", 255, 1))]),
    "an array of arrays": gguf([raw_entry("a", ARRAY, struct.pack("<IQ", ARRAY, 1))]),
    "2^63 numbers": gguf([raw_entry("a", ARRAY, struct.pack("<IQ", UINT64, 2**63))]),
    "2^63 strings": gguf([raw_entry("a", ARRAY, struct.pack("<IQ", STRING, 2**63))]),
    "a string in an array of 2^64-1 bytes": gguf([raw_entry("a", ARRAY, struct.pack("<IQQ", STRING, 1, HUGE))]),
    "an entry twice": gguf([ENTRIES[6], ENTRIES[6]]),
    "a template that is too large": gguf([entry("tokenizer.chat_template", "x" * (2**20 + 1))]),
    "a template that is a number": gguf([entry("tokenizer.chat_template", 1)]),
    "too many templates": gguf([entry(f"tokenizer.chat_template.{number}", "x") for number in range(17)]),
    "a tensor beyond the end": gguf(ENTRIES, TENSORS, data=bytes(551)),
    "a tensor at 2^64-1": gguf(tensors=[tensor("a", (1,), 0, HUGE)]),
    "a tensor of 2^63 times 2^63 values": gguf(tensors=[tensor("a", (2**63, 2**63), 0, 0)]),
    "a tensor of 2^32 dimensions": gguf(tensors=[text("a") + struct.pack("<I", 2**32 - 1)]),
    "a tensor of an unknown type beyond the end": gguf(tensors=[tensor("a", (1,), 255, 4096)]),
    "an alignment of 0": gguf([raw_entry("general.alignment", UINT32, bytes(4))]),
}


@pytest.mark.parametrize("content", HOSTILE.values(), ids=HOSTILE.keys())
def test_malicious_file_is_refused_with_a_message(write: Write, content: bytes) -> None:
    assert "GGUF" in _refusal(write(content)).message


def test_file_truncated_in_its_header_is_refused(write: Write) -> None:
    head = len(GOOD) - 552
    for length in range(head):
        _refusal(write(GOOD[:length]))


def test_skipped_strings_are_counted(write: Write, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("runner_svc.model_files.gguf.MAX_SKIPPED_STRINGS", 3)
    assert "too many items" in _refusal(write(GOOD)).message


def _outcome(path: Path) -> GgufHeader | WeftError:
    try:
        return read_gguf_header(path)
    except WeftError as error:
        return error


def test_excess_named_templates_are_refused_before_they_are_stored(write: Write) -> None:
    megabyte = "x" * (1024 * 1024)
    crowd = [entry(f"tokenizer.chat_template.t{n}", megabyte) for n in range(40)]
    path = write(gguf(crowd))
    del crowd
    tracemalloc.start()
    try:
        with pytest.raises(WeftError, match="more than 16 chat templates"):
            read_gguf_header(path)
        assert tracemalloc.get_traced_memory()[1] < 24 * 1024 * 1024
    finally:
        tracemalloc.stop()


def test_named_template_that_is_a_number_is_ignored(write: Write) -> None:
    named = entry("tokenizer.chat_template.seven", 7)
    assert read_gguf_header(write(gguf([named]))).named_templates == {}


SHAPE = (
    entry("general.architecture", "gemma3"),
    entry("general.file_type", 15),
    entry("gemma3.block_count", 4),
    entry("gemma3.embedding_length", 640),
    entry("gemma3.attention.head_count", 4),
    entry("gemma3.attention.sliding_window", 512),
)


def test_demo_model_shape_is_read() -> None:
    header = read_gguf_model(demo_model_path())
    assert header.weight_bytes == 96_576_768
    assert header.quantization == "q4_1"
    assert (header.layers, header.heads, header.kv_heads) == (30, 9, (3,) * 30)
    assert (header.key_length, header.value_length, header.embedding_length) == (64, 64, 576)
    assert (header.vocabulary, header.sliding_window) == (49_152, 0)


def test_missing_lengths_are_derived_from_the_heads(write: Write) -> None:
    header = read_gguf_header(write(gguf(SHAPE)))
    assert header.quantization == "q4_k_m"
    assert (header.key_length, header.value_length) == (160, 160)
    assert (header.kv_heads, header.sliding_window) == ((4,) * 4, 512)


def test_per_layer_lengths_and_heads_are_read(write: Write) -> None:
    further = (
        entry("gemma3.attention.key_length", 256),
        entry("gemma3.attention.value_length", 128),
        entry("gemma3.attention.head_count_kv", [1, 0, 2, 1]),
    )
    header = read_gguf_header(write(gguf((*SHAPE, *further))))
    assert (header.key_length, header.value_length, header.kv_heads) == (256, 128, (1, 0, 2, 1))


@pytest.mark.parametrize(
    "listed",
    [
        entry("gemma3.attention.head_count_kv", [1, 1, 1]),
        entry("gemma3.attention.head_count_kv", [1, 1, 1, 2**32 - 1]),
        raw_entry("gemma3.attention.head_count_kv", ARRAY, struct.pack("<IQ4i", 5, 4, 1, 1, 1, -1)),
        entry("gemma3.attention.head_count_kv", [1.0] * 4),
    ],
)
def test_implausible_list_is_ignored(write: Write, listed: bytes) -> None:
    """The total over all layers in place of a list: more than a layer can have."""
    assert read_gguf_header(write(gguf((*SHAPE, listed)))).kv_heads == (4,) * 4


def test_implausible_numbers_are_ignored(write: Write) -> None:
    entries = (
        SHAPE[0],
        raw_entry("gemma3.block_count", UINT64, struct.pack("<Q", HUGE)),
        raw_entry("gemma3.context_length", UINT64, struct.pack("<Q", HUGE)),
        raw_entry("gemma3.embedding_length", 5, struct.pack("<i", -1)),
        entry("gemma3.attention.head_count", float("nan")),
        entry("gemma3.attention.key_length", True),
        raw_entry("general.file_type", UINT64, struct.pack("<Q", HUGE)),
    )
    header = read_gguf_header(write(gguf(entries)))
    assert (header.layers, header.context_tokens, header.embedding_length) == (0, 0, 0)
    assert (header.heads, header.key_length, header.quantization, header.kv_heads) == (0, 0, "", ())


def test_long_lists_are_skipped(write: Write) -> None:
    crowd = [entry(f"a{number}.attention.head_count_kv", [1] * 1024) for number in range(2000)]
    path = write(gguf(crowd))
    assert _peak_bytes(path) < 4 * 1024 * 1024


def test_guessed_file_type_is_still_recognized(write: Write) -> None:
    assert read_gguf_header(write(gguf([entry("general.file_type", 1024 + 7)]))).quantization == "q8_0"


def test_tensor_weights_are_summed(write: Write) -> None:
    # 128 values of f32, and 64 values of q4_1 in two blocks.
    header = read_gguf_header(write(GOOD))
    assert (header.weight_bytes, header.parameter_count) == (128 * 4 + 2 * 20, 128 + 64)


def test_unknown_tensor_type_counts_everything_after_the_header(write: Write) -> None:
    unknown = (*TENSORS[:1], tensor("b", (64,), 250, 512))
    header = read_gguf_header(write(gguf(ENTRIES, unknown, data=bytes(4096))))
    assert (header.weight_bytes, header.parameter_count) == (4096, 0)


def test_overlapping_tensors_are_refused(write: Write) -> None:
    twice = (tensor("a", (64,), 0, 0), tensor("b", (64,), 0, 0))
    assert "overlap" in _refusal(write(gguf(tensors=twice, data=bytes(256)))).message


def test_parts_of_a_model_are_summed(tmp_path: Path) -> None:
    for number in (1, 2, 3):
        # Only the first one describes the model.
        part = gguf(SHAPE if number == 1 else (), (tensor("a", (64 * number,), 0, 0),), data=bytes(256 * number))
        (tmp_path / f"big-{number:05d}-of-00003.gguf").write_bytes(part)
    first = tmp_path / "big-00001-of-00003.gguf"
    header = read_gguf_model(first)
    assert (header.weight_bytes, header.tensor_count, header.layers) == (256 * 6, 3, 4)
    assert read_gguf_header(first).weight_bytes == 256
    assert read_gguf_model(first.with_name("big-00003-of-00003.gguf")) == header
    first.with_name("big-00002-of-00003.gguf").unlink()
    with pytest.raises(WeftError, match="part 2 of 3 is missing"):
        read_gguf_model(first)


@pytest.mark.parametrize("name", ["a-00000-of-00003.gguf", "a-00004-of-00003.gguf", "a-00001-of-99999.gguf"])
def test_invalid_part_names_are_refused(name: str) -> None:
    with pytest.raises(WeftError, match="GGUF"):
        model_parts(Path(name))


@pytest.mark.parametrize("name", ["a.gguf", "a-00001-of-00001.gguf", "a-1-of-2.gguf", "a-00001-of-00002.bin"])
def test_single_file_model_is_its_own_only_part(name: str) -> None:
    assert model_parts(Path(name)) == (Path(name),)


def test_wide_character_templates_stay_within_the_memory_bound(write: Write) -> None:
    """16 templates of a mebibyte each are allowed; as text of four bytes per character they would take 64 MiB."""
    wide = "x" * (1024 * 1024 - 4) + "\U0001f600"
    crowd = [entry(f"tokenizer.chat_template.t{n}", wide) for n in range(16)]
    path = write(gguf(crowd))
    assert "texts take more" in _refusal(path).message
    assert _peak_bytes(path) < 32 * 1024 * 1024


def test_longest_entry_names_stay_within_the_memory_bound(write: Write) -> None:
    names = [f"{number:06d}" + "x" * 244 + "\U0001f600" for number in range(MAX_ENTRIES)]
    path = write(gguf([entry(name, 1) for name in names]))
    del names
    assert _peak_bytes(path) < 32 * 1024 * 1024
    assert read_gguf_header(path).tensor_count == 0


def _peak_bytes(path: Path) -> int:
    tracemalloc.start()
    try:
        _outcome(path)
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("number", [0, 1, 4095, 4096, 4097, 9999])
def test_any_of_very_many_tokens_is_found(write: Write, number: int) -> None:
    words = [f"word {one}" + "x" * (one % 50) for one in range(10_000)]
    entries = [entry("tokenizer.ggml.tokens", words), entry("tokenizer.ggml.eos_token_id", number)]
    header = read_gguf_header(write(gguf(entries)))
    assert (header.eos_token, header.vocabulary) == (words[number], 10_000)


def test_strings_longer_than_the_read_buffer_are_skipped(write: Write) -> None:
    words = ["a", "b" * 200_000, "c" * 65_536, "d" * 65_528, "", "e" * 70_000, "last"]
    entries = [entry("tokenizer.ggml.tokens", words), entry("tokenizer.ggml.bos_token_id", 6), SHAPE[0]]
    header = read_gguf_header(write(gguf(entries)))
    assert (header.bos_token, header.architecture) == ("last", "gemma3")


def test_excessive_tensor_count_is_refused_quickly(write: Write) -> None:
    empty = tensor("a", (2**63, 2**63, 2**63, 0), 0, 0)
    content = gguf(tensors=(empty,) * MAX_TENSORS, data=bytes(64))
    assert read_gguf_header(write(content)).tensor_count == MAX_TENSORS
    one_more = content[:8] + (MAX_TENSORS + 1).to_bytes(8, "little") + content[16:]
    assert f"more than {MAX_TENSORS} tensors" in _refusal(write(one_more)).message
