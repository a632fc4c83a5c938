"""Limits the host memory of each engine process. Pure.

A request can make an engine allocate without bound. Without a limit, the whole machine stalls before the kernel kills
a process.
"""

from runner_svc.policy.memory_estimate import GIBIBYTE, MEBIBYTE, MemoryEstimate

ESTIMATE_FACTOR = 2
"""Limit per byte of the estimate: engines hold weights twice while they load or repack them."""
MARGIN_BYTES = 4 * GIBIBYTE
"""Engine memory besides the model: libraries, media, grammars, context checkpoints."""
BYTES_PER_PROCESSOR = 32 * MEBIBYTE
"""Thread stacks; engines start several threads per processor."""
OOM_SCORE = 500
"""Engines' `oom_score_adj` relative to the mesh's: if memory runs out, the kernel kills an engine first."""


def host_memory_limit(expected: MemoryEstimate | None, machine_bytes: int | None, processors: int) -> int | None:
    """Returns the limit in bytes; None: nothing is known.

    `expected`: the estimate of the whole model on all devices. `machine_bytes`: this machine's memory for engines.
    """
    by_estimate = None
    if expected is not None and expected.bytes:
        by_estimate = expected.bytes * ESTIMATE_FACTOR + MARGIN_BYTES + processors * BYTES_PER_PROCESSOR
    return min((limit for limit in (by_estimate, machine_bytes) if limit is not None), default=None)


def configured_limit(setting_mb: int | None, derived_bytes: int | None) -> int | None:
    """Returns the limit from a model's setting, else the derived one; None: no limit. A setting of 0 means no limit."""
    return derived_bytes if setting_mb is None else setting_mb * MEBIBYTE or None
