"""`${WEFT_WAKE_...}` in the headers of a recipe: a secret stays with whoever runs the recipe. Pure."""

import re
from collections.abc import Mapping

from weft.kernel.errors import WeftError
from weft.kernel.reasons import Reason

# Only names that were set for this purpose: a recipe from elsewhere must not read the rest of the environment.
_VARIABLE = re.compile(r"\$\{(WEFT_WAKE_[A-Z0-9_]+)\}")


def substituted(headers: Mapping[str, str], environment: Mapping[str, str]) -> dict[str, str]:
    """The headers with every variable replaced by its value. Raises WAKE_FAILED naming a variable that is not set."""

    def value_of(found: re.Match[str]) -> str:
        name = found[1]
        if name not in environment:
            raise WeftError(Reason.WAKE_FAILED, f"the environment variable {name} is not set where the recipe runs")
        return environment[name]

    return {header: _VARIABLE.sub(value_of, value) for header, value in headers.items()}
