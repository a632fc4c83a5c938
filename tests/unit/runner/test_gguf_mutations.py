"""Thousands of broken model files: each is read or refused, in little memory. WEFT_TEST_MUTATIONS=10000 tries more."""

import random
import resource
import struct
import subprocess
import sys
import tracemalloc
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import settings
from kit.gguf_bytes import UINT64, entry, gguf, raw_entry, tensor

from runner_svc.model_files.gguf import read_gguf_header
from weft.kernel.errors.error_tree import WeftError
from weft.kernel.errors.reasons import Reason
from weft_app.compose.demo import demo_model_path

SEED = 20_261_120
MUTATIONS = 10 * settings().max_examples
MAX_BYTES = 64 * 1024 * 1024
LIMITED_FILES = 50
ADDRESS_SPACE_BYTES = 512 * 1024 * 1024
"""Memory for an interpreter with the reader's imports, without room for an unchecked count."""
HUGE = (0, 1, 2**16, 2**31 - 1, 2**31, 2**32 - 1, 2**40, 2**62, 2**63 - 1, 2**63, 2**64 - 1)
Read = Callable[[Path], object]


def _small_model(random_numbers: random.Random) -> bytes:
    """A file as converters write it, with every kind of entry and a few tensors."""
    entries = [
        entry("general.architecture", "llama"),
        entry("general.alignment", 32),
        entry("llama.block_count", 3),
        entry("llama.attention.head_count", 2),
        entry("llama.attention.head_count_kv", [1, 1, 1]),
        entry("llama.embedding_length", 64),
        entry("tokenizer.ggml.scores", [0.0, 1.0, 2.0]),
        entry("tokenizer.ggml.tokens", ["<unk>", "<s>", "</s>"]),
        raw_entry("tokenizer.ggml.eos_token_id", UINT64, struct.pack("<Q", 2)),
        entry("tokenizer.chat_template", "{{ bos_token }}" * 4),
        entry("tokenizer.chat_template.tool_use", "{{ tools }}"),
    ]
    random_numbers.shuffle(entries)
    return gguf(entries, [tensor(f"t{n}", (64, 2), offset=512 * n) for n in range(4)], data=bytes(4 * 512))


def _mutated(content: bytes, random_numbers: random.Random, head_bytes: int) -> bytes:
    changed = bytearray(content)
    for _ in range(random_numbers.randint(1, 4)):
        index = random_numbers.randrange(head_bytes)
        match random_numbers.randrange(5):
            case 0:
                changed[index] ^= 1 << random_numbers.randrange(8)
            case 1:
                struct.pack_into("<Q", changed, min(index, len(changed) - 8), random_numbers.choice(HUGE))
            case 2:
                struct.pack_into("<I", changed, min(index, len(changed) - 4), random_numbers.choice(HUGE) % 2**32)
            case 3:
                del changed[index : index + random_numbers.randint(1, 16)]
                head_bytes = min(head_bytes, len(changed))
            case _:
                changed[index:index] = random_numbers.randbytes(random_numbers.randint(1, 16))
    if random_numbers.random() < 0.2:
        del changed[random_numbers.randrange(len(changed)) :]
    return bytes(changed)


def _files(count: int) -> Iterator[bytes]:
    random_numbers = random.Random(SEED)
    with demo_model_path().open("rb") as file:
        real = file.read(2 * 1024 * 1024)
    for number in range(count):
        if number % 100 == 99:
            # Among the first bytes there are more numbers than words.
            near = 4096 if number % 200 == 99 else len(real)
            yield _mutated(real, random_numbers, near)
        else:
            small = _small_model(random_numbers)
            yield _mutated(small, random_numbers, len(small) - 4 * 512)


def _judge(read: Read, path: Path) -> tuple[str, bool]:
    """Returns the fault of reading a file (empty: none), and whether it was refused."""
    tracemalloc.reset_peak()
    was_refused = False
    try:
        read(path)
    except WeftError as error:
        if error.reason is not Reason.INVALID_ARGUMENT:
            return f"the reason is {error.reason.name}", True
        was_refused = True
    except BaseException as error:  # noqa: BLE001 - whatever it is, it is the finding
        return f"{type(error).__name__}: {error}", False
    peak = tracemalloc.get_traced_memory()[1]
    return (f"{peak} bytes at once" if peak > MAX_BYTES else ""), was_refused


@pytest.mark.timeout(900)
def test_mutated_file_is_at_worst_refused(tmp_path: Path) -> None:
    path, refused = tmp_path / "model.gguf", 0
    tracemalloc.start()
    try:
        for number, content in enumerate(_files(MUTATIONS)):
            path.write_bytes(content)
            wrong, was_refused = _judge(read_gguf_header, path)
            assert not wrong, f"mutation {number} of seed {SEED}: {wrong}"
            refused += was_refused
    finally:
        tracemalloc.stop()
    assert MUTATIONS // 4 < refused < MUTATIONS, "most mutations were to matter, and some not"


def test_mutated_files_do_not_crash_the_process_under_a_memory_limit(tmp_path: Path) -> None:
    """tracemalloc sees only what Python allocates; the kernel sees all of it."""
    for number, content in enumerate(_files(LIMITED_FILES)):
        (tmp_path / f"{number}.gguf").write_bytes(content)
    program = (
        "import pathlib, sys\n"
        "from runner_svc.model_files.gguf import read_gguf_header\n"
        "from weft.kernel.errors.error_tree import WeftError\n"
        "for path in sorted(pathlib.Path(sys.argv[1]).iterdir()):\n"
        "    try:\n"
        "        read_gguf_header(path)\n"
        "    except WeftError:\n"
        "        pass\n"
        "print('all read')\n"
        "try:\n"
        f"    bytearray({ADDRESS_SPACE_BYTES})\n"
        "except MemoryError:\n"
        "    print('and limited')\n"
    )

    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_AS, (ADDRESS_SPACE_BYTES, ADDRESS_SPACE_BYTES))

    ended = subprocess.run(
        [sys.executable, "-c", program, str(tmp_path)],
        check=False,
        capture_output=True,
        text=True,
        timeout=60,
        preexec_fn=limit,
    )
    assert ended.stdout.split("\n")[:2] == ["all read", "and limited"], ended.stderr[-2000:]
