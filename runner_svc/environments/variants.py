"""The choice of an environment's variant."""

from collections.abc import Callable
from enum import StrEnum

from runner_svc.environments.environment import EngineEnvironment, Variant
from weft.kernel.errors import invalid_field


class VariantChoice(StrEnum):
    """The variant that a user asks for."""

    AUTO = "auto"
    CPU = "cpu"
    CUDA = "cuda"


def choose_variant(environment: EngineEnvironment, choice: VariantChoice, has_cards: Callable[[], bool]) -> Variant:
    """Returns the variant to install: the one asked for, else the one for the cards of this machine.

    `has_cards` is asked for `auto` alone. Raises INVALID_ARGUMENT where the environment has no such variant.
    """
    if choice is not VariantChoice.AUTO:
        wanted = Variant(choice.value)
        if wanted not in environment.variants:
            known = ", ".join(environment.variants)
            raise invalid_field("--variant", f"{environment.name} has no variant {wanted}, only {known}")
        return wanted
    if Variant.CUDA not in environment.variants:
        return Variant.CPU
    if has_cards():
        return Variant.CUDA
    if Variant.CPU in environment.variants:
        return Variant.CPU
    raise invalid_field(
        "--variant", f"{environment.name} needs an NVIDIA card, and there is none here; --variant cuda installs it"
    )
