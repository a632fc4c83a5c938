"""Last output lines of an engine that ran out of memory."""

import pytest
from kit.presence import present

from runner_svc.policy.engine_failures import LAST_LINES, explain_out_of_memory, last_words


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
        explain_out_of_memory(
            "exit code 1", ["loading", line, "main: exiting due to model loading error"], killed_for_memory=False
        )
    )
    assert line in why
    assert "fewer slots" in why


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
    assert explain_out_of_memory("exit code 1", lines, killed_for_memory=False) is None


def test_kernel_kill_is_explained_without_engine_output() -> None:
    why = present(explain_out_of_memory("signal SIGKILL", [], killed_for_memory=True))
    assert "memory limit" in why


def test_externally_killed_process_is_not_attributed_to_earlier_output() -> None:
    assert explain_out_of_memory("signal SIGKILL", ["CUDA error: out of memory"], killed_for_memory=False) is None
