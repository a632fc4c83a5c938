"""When a runner that its owner has taken out of the mesh is forgotten."""

from enum import IntEnum

from registry_svc.mesh.domain import Standing


class Retirement(IntEnum):
    """What becomes of a runner that is to be retired; numbers as in `registry.v1.RetireSessionResponse.Outcome`."""

    RETIRED = 1
    """It is forgotten, with all that it published."""
    LIVES = 2
    """It may still answer: it is forgotten once it is closed or silent."""
    HOLDS_MEMORY = 3
    """Memory is booked for it: it is inactive, and forgotten once that memory is free."""
    UNKNOWN = 4
    """There is no such session: it was forgotten before."""


def decide_retirement(*, standing: Standing, reported: bool, process_ended: bool, lease_count: int) -> Retirement:
    """What becomes of a runner that is to be retired.

    `reported`: whether it was heard in this life of the registry. `process_ended`: whether its owner says that its
    process is gone, which a report refutes. `lease_count`: leases of accelerator memory that it holds, also those that
    no process answers for any more: the memory may still be in use.
    """
    if standing is Standing.ACTIVE and (reported or not process_ended):
        return Retirement.LIVES
    return Retirement.HOLDS_MEMORY if lease_count else Retirement.RETIRED
