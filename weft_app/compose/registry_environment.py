"""What the environment says of the registry: below weft.yaml, above defaults."""

from collections.abc import Mapping

from weft.kernel.errors import invalid_field

CLOUD_FALLBACK_VARIABLE = "WEFT_ALLOW_CLOUD_FALLBACK"
_WORDS = {"1": True, "true": True, "yes": True, "on": True, "0": False, "false": False, "no": False, "off": False}


def allow_cloud_fallback(configured: bool | None, environment: Mapping[str, str]) -> bool:
    """Whether routes may fall back to models off the premises until an operator says otherwise.

    `configured` is what weft.yaml says, None for nothing. Raises INVALID_ARGUMENT naming the variable.
    """
    if configured is not None:
        return configured
    word = environment.get(CLOUD_FALLBACK_VARIABLE, "").strip().lower()
    if not word:
        return True
    if word not in _WORDS:
        raise invalid_field(CLOUD_FALLBACK_VARIABLE, "must be true or false")
    return _WORDS[word]
