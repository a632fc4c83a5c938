"""Keys of servers and providers, which are in environment variables and nowhere else."""

from collections.abc import Mapping

from weft.kernel.errors import WeftError
from weft.kernel.reasons import Reason


def read_key(variable: str | None, environment: Mapping[str, str]) -> str:
    """The key in an environment variable; empty where no variable is named.

    Raises INVALID_ARGUMENT naming the variable, never its value.
    """
    if variable is None:
        return ""
    key = environment.get(variable, "").strip()
    if not key:
        raise WeftError(Reason.INVALID_ARGUMENT, f"the environment variable {variable} is to hold the key and is empty")
    if not (key.isascii() and key.isprintable()):
        raise WeftError(Reason.INVALID_ARGUMENT, f"the key in the environment variable {variable} is no printable text")
    return key
