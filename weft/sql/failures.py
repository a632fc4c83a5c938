"""Database failures: the code, and one sentence with the problem and the remedy."""

import errno

from weft.sql.address import DatabaseAddress

_RESTORE = "restore it from a backup, or move it away to begin with an empty one"
_FULL = "free some space on its disk"
_ACCESS = "let this user read and write it and its folder, or choose another home"
_CONNECT = "check that it is there and takes connections"
_REMEDIES = {
    "SQLITE_NOTADB": ("is no database", _RESTORE),
    "SQLITE_CORRUPT": ("is damaged", _RESTORE),
    "SQLITE_FULL": ("cannot be written", _FULL),
    "SQLITE_IOERR": ("cannot be read or written", "look at its disk: it may be full or failing"),
    "SQLITE_READONLY": ("is read-only", _ACCESS),
    "SQLITE_CANTOPEN": ("cannot be opened", _ACCESS),
    "SQLITE_PERM": ("cannot be opened", _ACCESS),
    "SQLITE_BUSY": ("is locked by another program", "end that program"),
}
_FULL_NUMBERS = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})


class DatabaseError(Exception):
    """A failed statement, commit or connection. The text contains no written values and no password."""

    def __init__(self, code: str, text: str) -> None:
        """`code` is, for example, SQLITE_FULL or an SQLSTATE; `text` is for the log."""
        super().__init__(text)
        self.code = code


def sentence_of(owner: str, address: DatabaseAddress, error: DatabaseError | OSError) -> str:
    """Returns a sentence with the problem of a service's database, and the remedy."""
    place = place_of(owner, address)
    if isinstance(error, OSError):
        remedy = _FULL if error.errno in _FULL_NUMBERS else _ACCESS
        return f"{place} cannot be used: {error.strerror or error.errno}; {remedy}"
    what, remedy = _REMEDIES.get("_".join(error.code.split("_")[:2]), ("cannot be used", _CONNECT))
    return f"{place} {what} ({error.code}); {remedy}"


def place_of(owner: str, address: DatabaseAddress) -> str:
    """Returns a text such as `the router's database /var/lib/weft/router.db`."""
    return f"the {owner}'s database {address.place}"
