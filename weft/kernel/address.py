"""Addresses of runners: a gRPC target, and for a runner behind a relay the name by which the relay knows it."""

RUNNER_KEY = "weft-runner"
"""Metadata key that tells a relay for which of its runners a call is."""

_SEPARATOR = "#runner="


def relayed_address(target: str, runner: str) -> str:
    """The address of a runner that the relay at `target` holds the link of."""
    return f"{target}{_SEPARATOR}{runner}"


def target_of(address: str) -> str:
    """The gRPC target to connect to."""
    return address.partition(_SEPARATOR)[0]


def metadata_of(address: str) -> tuple[tuple[str, str], ...]:
    """Metadata that every call to this address carries; empty when the runner listens there itself."""
    _, separator, runner = address.partition(_SEPARATOR)
    return ((RUNNER_KEY, runner),) if separator else ()
