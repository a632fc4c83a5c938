"""Which engines the runners of a configuration use, and which would be faster on this machine's devices."""

from collections.abc import Iterable, Iterator

from runner_svc.environments.environment import Variant, fitting_variants
from runner_svc.environments.folder import EnvironmentFolder
from runner_svc.runtimes.table import AnyRuntime
from weft.gpu.nvml import capabilities_within, read_within
from weft.kernel.errors.error_tree import WeftError

DRIVER_SECONDS = 5.0
"""Timeout of NVIDIA's library, which hangs if a card does; then there are no cards."""
Engine = tuple[AnyRuntime, tuple[str, ...] | None]
"""A runtime, and the command that a runner configures for it."""


def has_nvidia_cards() -> bool:
    """Whether NVIDIA's driver reports cards."""
    reading = read_within(DRIVER_SECONDS)
    return reading is not None and bool(reading.devices)


def card_capabilities() -> tuple[str, ...]:
    """Returns the compute capabilities of NVIDIA's cards here; empty: there are none."""
    return capabilities_within(DRIVER_SECONDS)


def reported(engines: Iterable[Engine]) -> list[Engine]:
    """Returns the engines with a report, once each."""
    found = {(runtime.name, command): (runtime, command) for runtime, command in engines}
    return [each for each in found.values() if each[0].engine_report is not None]


def engine_reports(engines: Iterable[Engine], environments: EnvironmentFolder) -> Iterator[tuple[str, str]]:
    """Yields each engine with the reason for it, and the advice for a faster one; empty: there is none.

    An engine that is missing has no line: the checks of requirements report it.
    """
    fitting: tuple[Variant, ...] | None = None
    for runtime, command in reported(engines):
        assert runtime.engine_report is not None, "those without are left out"
        fitting = tuple(fitting_variants(has_nvidia_cards)) if fitting is None else fitting
        try:
            yield runtime.engine_report(command, environments, fitting)
        except WeftError:
            continue
