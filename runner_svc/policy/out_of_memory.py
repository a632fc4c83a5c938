"""Whether an engine ended for want of memory, told from its last words and from what the kernel says."""

import re
from collections.abc import Sequence

LAST_LINES = 20
"""How many of an engine's last lines are looked at: llama.cpp prints about ten after the one that matters."""
ADVICE = "a smaller context_tokens or fewer slots need less"

_WORDS = re.compile(
    r"""
    failed\ to\ allocate      # ggml-alloc.c, llama-kv-cache.cpp, llama-context.cpp: buffers of weights and cache
    | unable\ to\ allocate    # llama-model.cpp: "unable to allocate CUDA0 buffer"
    | cudaMalloc\ failed      # ggml-cuda.cu
    | out\ of\ memory         # CUDA, HIP and Metal; "CUDA out of memory" is PyTorch's
    | OutOfMemoryError        # PyTorch's exception, as vLLM prints it
    | No\ available\ memory\ for\ the\ cache\ blocks  # vLLM, when its cache does not fit
    | std::bad_alloc          # the C++ library
    | Cannot\ allocate\ memory  # ENOMEM in words
    | MemoryError             # Python
    """,
    re.IGNORECASE | re.VERBOSE,
)
# ggml goes on without page-locked memory, and says so with the same words.
_KILLED = "SIGKILL"
_HARMLESS = re.compile(r"pinned memory|falling back", re.IGNORECASE)


def last_words(lines: Sequence[str]) -> str | None:
    """The first of the last lines that speaks of memory that could not be had; None: none does."""
    return next((line for line in lines[-LAST_LINES:] if _WORDS.search(line) and not _HARMLESS.search(line)), None)


def explanation(how: str, lines: Sequence[str], *, killed_for_memory: bool) -> str | None:
    """Why the process that ended as `how` says ran out of memory, with advice; None when it did not.

    `killed_for_memory`: the kernel killed one of its processes because a memory limit was reached. A process that
    somebody else killed did not end for what it said before.
    """
    if killed_for_memory:
        return f"{how}: the kernel ended it because its memory limit was reached; {ADVICE}"
    words = None if _KILLED in how else last_words(lines)
    return None if words is None else f"{how}: it ran out of memory ({words.strip()}); {ADVICE}"
