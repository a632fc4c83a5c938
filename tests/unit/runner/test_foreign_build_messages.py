"""Ends of an engine, explained: a program that was built for another processor, and lack of memory."""

import pytest
from kit.presence import present

from runner_svc.policy.engine_failures import (
    ADVICE,
    LAST_LINES,
    MemoryKill,
    explain_foreign_build,
    explain_out_of_memory,
    last_words,
    load_cause,
    program_name,
)
from weft_extensions.engines.library_server import program_command

NATIVE = ("/opt/llama.cpp/llama-server", "--model", "a.gguf")
WHEEL = ("/usr/bin/python3", "-m", "runner_svc.runtimes.llama_server.xllamacpp_launcher")
LIBRARY = ("/usr/bin/python3", "-m", "weft_extensions.engines.llama_cpp_python.server")


@pytest.mark.parametrize(
    "how",
    ["signal SIGSEGV", "signal SIGSEGV (core dumped)", "signal SIGILL", "exit code 139", "exit code 132"],
)
def test_crash_before_the_first_answer_names_signal_program_cause_and_remedy(how: str) -> None:
    why = present(explain_foreign_build(how, NATIVE, has_answered=False))
    assert why.startswith(f"{how} before its first answer: llama-server was probably built for another processor")
    assert "-DGGML_NATIVE=OFF" in why
    assert "xllamacpp" in why


def test_only_an_illegal_instruction_is_explained_after_an_answer() -> None:
    assert explain_foreign_build("signal SIGSEGV", NATIVE, has_answered=True) is None
    why = present(explain_foreign_build("signal SIGILL", NATIVE, has_answered=True))
    assert "before its first answer" not in why


@pytest.mark.parametrize("how", ["signal SIGKILL", "signal SIGABRT", "signal SIGBUS", "exit code 1", "exit code 0"])
def test_other_exits_are_not_explained_as_a_foreign_build(how: str) -> None:
    assert explain_foreign_build(how, NATIVE, has_answered=False) is None


def test_remedy_is_possible_for_the_program() -> None:
    wheel = explain_foreign_build("signal SIGILL", WHEEL, has_answered=False)
    library = explain_foreign_build("signal SIGILL", LIBRARY, has_answered=False)
    assert wheel is not None
    assert library is not None
    assert "name it in the runner's `command`" in wheel
    assert "CMAKE_ARGS=-DGGML_NATIVE=OFF" in library


def test_remedy_for_another_library_does_not_suggest_building_llama_cpp() -> None:
    command = program_command("weft_extensions.engines.ctranslate2.server", "/opt/engine/bin/python")
    assert program_name(command) == "weft_extensions.engines.ctranslate2.server"
    why = present(explain_foreign_build("signal SIGILL", command, has_answered=False))
    assert "GGML" not in why
    assert "install a version of the engine's library" in why
    library = program_command("weft_extensions.engines.llama_cpp_python.server")
    assert "CMAKE_ARGS" in (explain_foreign_build("signal SIGILL", library, has_answered=False) or "")


@pytest.mark.parametrize(
    ("command", "name"),
    [(NATIVE, "llama-server"), (WHEEL, WHEEL[2]), (("llama-server",), "llama-server"), ((), "the engine")],
)
def test_program_has_its_common_name(command: tuple[str, ...], name: str) -> None:
    assert program_name(command) == name


@pytest.mark.parametrize(
    "line",
    [
        "alloc_buffer: allocating 4096.00 MiB on device 0: cudaMalloc failed: out of memory",
        "alloc_tensor_range: failed to allocate CUDA0 buffer of size 4294967296",
        "llama_model_load: error loading model: unable to allocate CUDA0 buffer",
        "llama_init_from_model: failed to initialize the context: failed to allocate buffer for kv cache",
        "CUDA error: out of memory",
        "terminate called after throwing an instance of 'std::bad_alloc'",
        "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB.",
        "ValueError: No available memory for the cache blocks. Try increasing `gpu_memory_utilization`",
        "mmap: Cannot allocate memory",
        "MemoryError",
    ],
)
def test_engine_specific_out_of_memory_messages_are_recognized(line: str) -> None:
    why = present(
        explain_out_of_memory("exit code 1", ["loading", line, "main: exiting due to model loading error"], kill=None)
    )
    assert why == f"exit code 1: it ran out of memory; {ADVICE}", "the line itself may quote a prompt"


@pytest.mark.parametrize(
    "lines",
    [
        [],
        ["main: exiting due to model loading error", "failed to load model"],
        ["ggml_cuda_host_malloc: failed to allocate 512.00 MiB of pinned memory: out of memory"],
        ["unable to allocate CUDA0 buffer", *["slot released"] * LAST_LINES],
    ],
    ids=["nothing", "another cause", "a warning", "long ago"],
)
def test_other_messages_are_not_out_of_memory(lines: list[str]) -> None:
    assert last_words(lines) is None
    assert explain_out_of_memory("exit code 1", lines, kill=None) is None


@pytest.mark.parametrize(
    ("line", "cause"),
    [
        ("error: unknown argument: --fast", "it does not accept one of its arguments"),
        ("OSError: [Errno 98] Address already in use", "its port is in use"),
        ("llama_model_load: error loading model: unknown model architecture: 'new'", "it does not support the arch"),
        ("gguf_init_from_file: invalid magic characters: 'abcd'", "it cannot read the model's file"),
        ("ModuleNotFoundError: No module named 'torch'", "a library is missing"),
        ("Received request: prompt: hello", ""),
    ],
)
def test_cause_of_a_failed_load_is_from_a_fixed_list(line: str, cause: str) -> None:
    found = load_cause(["loading", line, "exiting"])
    assert found.startswith(cause)
    assert bool(found) is bool(cause)


@pytest.mark.parametrize(
    ("kill", "words"),
    [
        (MemoryKill.OWN_LIMIT, "its memory limit was reached; a smaller context_tokens"),
        (MemoryKill.SHARED_LIMIT, "the memory limit of the container or service around weft was reached; raise that"),
        (MemoryKill.MACHINE, "the whole machine ran out of memory; stop other programs"),
    ],
)
def test_kernel_kill_is_explained_without_engine_output(kill: MemoryKill, words: str) -> None:
    why = present(explain_out_of_memory("signal SIGKILL", [], kill=kill))
    assert why.startswith(f"signal SIGKILL: the kernel killed it because {words}")


def test_externally_killed_process_is_not_attributed_to_earlier_output() -> None:
    assert explain_out_of_memory("signal SIGKILL", ["CUDA error: out of memory"], kill=None) is None
