"""Limits on the number of resources."""

from weft.kernel.errors.error_tree import WeftError
from weft.kernel.errors.reasons import Reason


def require_room(what: str, present: int, arriving: int, limit: int) -> None:
    """Raises TOO_MANY_RESOURCES if `present` and `arriving` of `what` exceed `limit`."""
    if arriving > 0 and present + arriving > limit:
        raise WeftError(
            Reason.TOO_MANY_RESOURCES,
            f"the mesh may have {limit} {what} and has {present}; delete some that are not needed any more",
            metadata={"resource": what, "limit": str(limit)},
        )
