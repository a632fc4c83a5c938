"""Safetensors headers and their folders: weights are added up, and all values are checked."""

import json
import random
import tracemalloc
from pathlib import Path
from typing import Any

import pytest
from kit.failures import fails

from runner_svc.model_files import safetensors
from runner_svc.model_files.safetensors import SafetensorsModel, is_safetensors, read_safetensors_model
from weft.kernel.errors.error_tree import WeftError
from weft.kernel.errors.reasons import Reason

MUTATIONS = 200
CONFIG = {
    "num_hidden_layers": 16,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "hidden_size": 2048,
    "vocab_size": 128_256,
    "max_position_embeddings": 131_072,
    "sliding_window": None,
    "rope_scaling": {"factor": 32.0},
}


def _tensor(begin: int, end: int) -> dict[str, Any]:
    return {"dtype": "BF16", "shape": [1], "data_offsets": [begin, end]}


def _content(tensors: dict[str, Any], data: int, header: bytes | None = None) -> bytes:
    raw = json.dumps(tensors).encode() if header is None else header
    return len(raw).to_bytes(8, "little") + raw + bytes(data)


def _write(folder: Path, name: str, *sizes: int) -> None:
    begin, tensors = 0, {"__metadata__": {"format": "pt"}}
    for number, size in enumerate(sizes):
        tensors[f"{name}.{number}"] = _tensor(begin, begin + size)
        begin += size
    (folder / name).write_bytes(_content(tensors, begin))


def _refusal(path: Path) -> WeftError:
    with fails(Reason.INVALID_ARGUMENT) as refused:
        read_safetensors_model(path)
    assert "safetensors" in refused.value.message
    return refused.value


def test_folder_is_described_by_its_weights_and_configuration(tmp_path: Path) -> None:
    _write(tmp_path, "model.safetensors", 100, 28)
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    model = read_safetensors_model(tmp_path)
    assert (model.weight_bytes, model.tensor_count) == (128, 2)
    assert model.file_bytes == (tmp_path / "model.safetensors").stat().st_size
    assert (model.layers, model.heads, model.kv_heads, model.key_length, model.value_length) == (
        16,
        32,
        (8,) * 16,
        64,
        64,
    )
    assert (model.embedding_length, model.vocabulary, model.context_tokens) == (2048, 128_256, 131_072)
    assert model.sliding_window == 0
    assert read_safetensors_model(tmp_path / "model.safetensors") == model


def test_only_files_listed_in_the_index_are_summed(tmp_path: Path) -> None:
    _write(tmp_path, "model-00001-of-00002.safetensors", 100)
    _write(tmp_path, "model-00002-of-00002.safetensors", 50, 50)
    _write(tmp_path, "consolidated.safetensors", 200)
    weight_map = {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}
    index = {"metadata": {"total_size": 10**18}, "weight_map": weight_map}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    model = read_safetensors_model(tmp_path)
    assert (model.weight_bytes, model.tensor_count, model.layers) == (200, 3, 0)
    (tmp_path / "model.safetensors.index.json").unlink()
    assert read_safetensors_model(tmp_path).weight_bytes == 400, "without an index nobody knows better"


def test_missing_file_of_an_index_is_reported(tmp_path: Path) -> None:
    _write(tmp_path, "model-00001-of-00002.safetensors", 100)
    names = {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": names}))
    assert "1 of 2 files are missing" in _refusal(tmp_path).message


def test_index_cannot_reference_files_outside_its_folder(tmp_path: Path) -> None:
    inside = tmp_path / "inside"
    inside.mkdir()
    _write(tmp_path, "secret.safetensors", 100)
    for name in ("../secret.safetensors", str(tmp_path / "secret.safetensors")):
        (inside / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": name}}))
        assert "has none" in _refusal(inside).message


def test_missing_configuration_values_are_derived(tmp_path: Path) -> None:
    _write(tmp_path, "model.safetensors", 8)
    (tmp_path / "config.json").write_text(
        json.dumps({"num_hidden_layers": 2, "num_attention_heads": 4, "hidden_size": 256})
    )
    model = read_safetensors_model(tmp_path)
    assert (set(model.kv_heads), model.key_length) == ({4}, 64)


def test_vision_model_numbers_are_read_from_the_nested_configuration(tmp_path: Path) -> None:
    _write(tmp_path, "model.safetensors", 8)
    (tmp_path / "config.json").write_text(json.dumps({"text_config": CONFIG, "vision_config": {"num_layers": 9}}))
    assert read_safetensors_model(tmp_path).layers == 16


def test_implausible_configuration_numbers_are_ignored(tmp_path: Path) -> None:
    _write(tmp_path, "model.safetensors", 8)
    values = {"num_hidden_layers": 10**9, "num_attention_heads": -4, "hidden_size": "2048", "head_dim": True}
    (tmp_path / "config.json").write_text(json.dumps({**values, "vocab_size": 10**30, "sliding_window": 1.5}))
    model = read_safetensors_model(tmp_path)
    assert (model.layers, model.heads, model.embedding_length, model.key_length) == (0, 0, 0, 0)
    assert (model.vocabulary, model.sliding_window) == (0, 0)


HOSTILE: dict[str, bytes] = {
    "an empty file": b"",
    "a length and nothing behind it": (100).to_bytes(8, "little"),
    "a length of 2^64-1": b"\xff" * 8 + b"{}",
    "no JSON": _content({}, 0, b"{" + b" " * 10),
    "a list": _content({}, 0, b"[]"),
    "JSON of a hundred thousand levels": _content({}, 0, b'{"a":' + b"[" * 100_000),
    "levels in what is stepped over": _content({}, 0, b'{"a":{"x":' + b"[" * 100_000 + b"]" * 100_000 + b"}}"),
    "no UTF-8": _content({}, 0, b'{"\xff":{}}'),
    "an end before its begin": _content({"a": _tensor(8, 4)}, 16),
    "a begin below zero": _content({"a": _tensor(-4, 4)}, 16),
    "a tensor beyond the end": _content({"a": _tensor(0, 17)}, 16),
    "a tensor at 2^63": _content({"a": _tensor(2**63 - 8, 2**63)}, 16),
    "a tensor at 10^30": _content({"a": _tensor(0, 10**30)}, 16),
    "tensors that overlap": _content({"a": _tensor(0, 16), "b": _tensor(0, 16)}, 16),
    "three offsets": _content({"a": {"data_offsets": [0, 1, 2]}}, 16),
    "offsets that are fractions": _content({"a": {"data_offsets": [0, 1.5]}}, 16),
}


@pytest.mark.parametrize("content", HOSTILE.values(), ids=HOSTILE.keys())
def test_malicious_file_is_refused_with_a_message(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "model.safetensors").write_bytes(content)
    _refusal(tmp_path)


@pytest.mark.parametrize("config", [b"", b"[]", b"{" * 100_000, b'{"text_config": []}', b"\xff" * 10, b'{"x":1}' * 2])
def test_malicious_configuration_is_refused_with_a_message(tmp_path: Path, config: bytes) -> None:
    _write(tmp_path, "model.safetensors", 8)
    (tmp_path / "config.json").write_bytes(config)
    _refusal(tmp_path)


def test_oversized_files_are_refused_without_reading(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _write(tmp_path, "model.safetensors", 8)
    for name, words in (
        ("MAX_HEADER_BYTES", "header has more"),
        ("MAX_TENSORS", "more than -1 tensors"),
        ("MAX_CONFIG_BYTES", "config.json has more"),
        ("MAX_INDEX_BYTES", "index.json has more"),
        ("MAX_SHARDS", "more than 0 files"),
    ):
        (tmp_path / "config.json").write_text("{}")
        (tmp_path / "model.safetensors.index.json").write_text('{"weight_map": {"a": "model.safetensors"}}')
        with monkeypatch.context() as patch:
            patch.setattr(safetensors, name, -1 if name == "MAX_TENSORS" else 0)
            assert words in _refusal(tmp_path).message


@pytest.mark.parametrize(
    "header",
    [
        b"{" + b",".join(b'"%d":{}' % n for n in range(700_000)) + b"}",
        b"{" + b",".join(b'"%d":{"data_offsets":[0,0]}' % n for n in range(32_000)) + b"}",
        b'{"a":{"shape":[' + b"1," * 3_000_000 + b'1],"data_offsets":[0,0]}}',
        b'{"__metadata__":{"tags":"' + b"x," * 3_000_000 + b'"}}',
        b'{"' + "\U0001f600".encode() * 1_900_000 + b'":{}}',
    ],
    ids=["a crowd of tensors", "as many as may be", "a shape of millions", "metadata of megabytes", "a wide name"],
)
def test_largest_headers_use_little_memory(tmp_path: Path, header: bytes) -> None:
    (tmp_path / "model.safetensors").write_bytes(_content({}, 16, header))
    tracemalloc.start()
    try:
        _outcome(tmp_path)
        assert tracemalloc.get_traced_memory()[1] < 64 * 1024 * 1024
    finally:
        tracemalloc.stop()


def test_mutated_headers_are_read_or_refused_without_a_crash(tmp_path: Path) -> None:
    random_numbers = random.Random(20_261_120)
    good = _content({f"layer.{n}": _tensor(8 * n, 8 * n + 8) for n in range(20)}, 160)
    path, refused = tmp_path / "model.safetensors", 0
    for _ in range(MUTATIONS):
        content = bytearray(good)
        for _ in range(random_numbers.randint(1, 3)):
            index = random_numbers.randrange(len(good) - 160)
            content[index : index + random_numbers.randint(0, 4)] = random_numbers.randbytes(
                random_numbers.randint(0, 4)
            )
        path.write_bytes(content)
        outcome = _outcome(path)
        if isinstance(outcome, WeftError):
            assert outcome.reason is Reason.INVALID_ARGUMENT
            refused += 1
        else:
            assert 0 <= outcome.weight_bytes <= len(content)
    assert MUTATIONS // 4 < refused < MUTATIONS


def _outcome(path: Path) -> SafetensorsModel | WeftError:
    try:
        return read_safetensors_model(path)
    except WeftError as error:
        return error


def test_safetensors_is_recognized_by_file_name(tmp_path: Path) -> None:
    assert not is_safetensors(tmp_path)
    _write(tmp_path, "model.safetensors", 8)
    assert is_safetensors(tmp_path)
    assert is_safetensors(tmp_path / "model.safetensors")
    assert not is_safetensors(tmp_path / "model.bin")
