"""What a machine that joined over a relay may publish: its own names, and no pool of others."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase

from weft.kernel.errors.error_tree import WeftError, invalid_field
from weft.kernel.errors.reasons import Reason
from weft.kernel.values.names import is_model_name

_CONFIGURED = ""
"""The owner of names in weft.yaml."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Joiner:
    """The rights of the join token or machine by which a runner joined, and the names of others."""

    id: str
    name_pattern: str
    pool: str
    """A pool of others that its models may join; empty: none."""
    reserved: Mapping[str, str]
    """Owners by name: the id of a token or machine, or `_CONFIGURED`."""

    def require_name(self, name: str) -> None:
        """Raises PERMISSION_DENIED for a name that it may not have, ALREADY_EXISTS for one that others keep."""
        if self.name_pattern and not fnmatchcase(name, self.name_pattern):
            raise WeftError(
                Reason.PERMISSION_DENIED,
                f"its join token permits the names {self.name_pattern} and not {name}; "
                "choose another name, or join with another token (weft runner token create --name)",
            )
        owner = self.reserved.get(name, self.id)
        if owner != self.id:
            whose = "the configuration of the mesh"
            if owner != _CONFIGURED:
                whose = f"another machine, even if it is away (it ends with: weft runner token revoke {owner})"
            raise WeftError(Reason.ALREADY_EXISTS, f"the name {name!r} is reserved for {whose}; choose another name")

    def owning(self, names: Collection[str]) -> "Joiner":
        """Returns the rights with names of a session that proves to be its own."""
        others = {name: owner for name, owner in self.reserved.items() if name not in names or owner == _CONFIGURED}
        return replace(self, reserved=others)

    def others_pool(self, pool: str) -> WeftError:
        """Returns the error for a pool with models of others."""
        return WeftError(
            Reason.PERMISSION_DENIED,
            f"{pool} has models of others; join it with a token of `weft runner token create --pool {pool}`",
        )


def check_name_pattern(pattern: str) -> None:
    """Raises INVALID_ARGUMENT unless it is empty, or a name with `*` for any characters."""
    if pattern and not is_model_name(pattern.replace("*", "x")):
        raise invalid_field("name_pattern", "must be a name, in which * stands for any characters, such as desk-*")
