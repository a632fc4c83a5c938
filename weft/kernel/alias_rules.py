"""Rules for aliases: allowed patterns and targets."""

from weft.kernel.errors import invalid_field
from weft.kernel.names import (
    AUTO_MODEL,
    KIND_PREFIXES,
    MAX_NAME_CHARS,
    MAX_TENANT_CHARS,
    is_model_name,
    is_name,
    is_resource_id,
    is_token,
)

ANY = "*"
"""Wildcard at the end of a pattern."""


def check_alias(name: str, pattern: str, target: str, tenant: str, field: str = "") -> None:
    """Raises INVALID_ARGUMENT naming the invalid field below `field`. An empty pattern means the name."""
    within = f"{field}." if field else ""
    pattern = pattern or name
    _check_pattern(pattern, f"{within}pattern")
    prefix = next((prefix for prefix in KIND_PREFIXES if target.startswith(prefix)), "")
    if not (is_name(target.removeprefix(prefix)) if prefix else is_model_name(target)):
        raise invalid_field(
            f"{within}target", "must be a model or a pool by name, agent/NAME, route/NAME or workflow/NAME"
        )
    if target == pattern:
        raise invalid_field(f"{within}target", "must be another name than the alias stands for")
    if tenant and not is_token(tenant, MAX_TENANT_CHARS):
        raise invalid_field(f"{within}tenant", f"must be at most {MAX_TENANT_CHARS} letters, digits or '._:@/+=-'")


def matches(pattern: str, name: str) -> bool:
    """Whether a pattern matches a name."""
    return name.startswith(pattern[:-1]) if pattern.endswith(ANY) else name == pattern


def _check_pattern(pattern: str, field: str) -> None:
    beginning = pattern.removesuffix(ANY)
    if len(pattern) > MAX_NAME_CHARS or (beginning and not is_token(beginning, MAX_NAME_CHARS)):
        raise invalid_field(
            field,
            f"must be one name, or a beginning of names and '*', such as claude-*: at most {MAX_NAME_CHARS} letters, "
            "digits or '._:@/+=-', starting with a letter or digit",
        )
    if pattern == AUTO_MODEL or pattern.startswith(KIND_PREFIXES) or is_resource_id(pattern):
        raise invalid_field(field, "must not be 'auto', an id, or begin with agent/ or route/: these have a meaning")
