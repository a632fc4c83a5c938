"""The limit of the host's memory for each process of an engine. Pure.

A request can make an engine allocate without end. Without a limit the whole machine stands still before the kernel
ends anything.
"""

from runner_svc.policy.memory_estimate import GIBIBYTE, MEBIBYTE, MemoryEstimate

ESTIMATE_FACTOR = 2
"""Limit per byte of the estimate: engines hold weights a second time while they load or repack them."""
MARGIN_BYTES = 4 * GIBIBYTE
"""Memory of an engine beside its model: libraries, media, grammars, checkpoints of contexts."""
BYTES_PER_PROCESSOR = 32 * MEBIBYTE
"""Stacks of threads, of which engines start several per processor."""
OOM_SCORE = 500
"""What an engine's score is above the mesh's (`oom_score_adj`): if memory runs out, the kernel ends an engine first."""


def host_memory_limit(expected: MemoryEstimate | None, machine_bytes: int | None, processors: int) -> int | None:
    """Returns the limit in bytes; None: nothing is known.

    `expected`: the estimate of the whole model, wherever it is. `machine_bytes`: what engines may have of this machine.
    """
    by_estimate = None
    if expected is not None and expected.bytes:
        by_estimate = expected.bytes * ESTIMATE_FACTOR + MARGIN_BYTES + processors * BYTES_PER_PROCESSOR
    return min((limit for limit in (by_estimate, machine_bytes) if limit is not None), default=None)


def configured_limit(setting_mb: int | None, derived_bytes: int | None) -> int | None:
    """Returns the limit by a model's setting, else the derived one; None: there is none. The setting 0 is no limit."""
    return derived_bytes if setting_mb is None else setting_mb * MEBIBYTE or None
