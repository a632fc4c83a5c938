"""Which responses are kept, as the operator says."""

from enum import StrEnum


class KeepResponses(StrEnum):
    """What becomes of a response that is complete."""

    BY_DEFAULT = "by_default"
    """It is kept unless its request says `"store": false`."""
    ON_REQUEST = "on_request"
    """It is kept where its request says `"store": true`."""
    NEVER = "never"
    """It is not kept, and a request that says `"store": true` is refused."""
