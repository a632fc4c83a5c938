"""What is used of the limits of tenants, as a router counts it, for tables and pages."""

from collections.abc import Collection, Sequence
from pathlib import Path

from weft.kernel.errors import WeftError
from weft.kernel.principal import actor_words
from weft.kernel.units import Rate, RateUnit, wait_words
from weft_app.cli.follow import poll_records
from weft_app.cli.mesh_api import connect
from weft_app.cli.mesh_documents import Document
from weft_app.cli.options import ResourceFormat, note
from weft_app.cli.output import Column, Listing, page, table_block

MAX_SHOWN_USES = 3
"""Windows of one tenant in a table; `weft describe` has all of them."""


def limit_uses(home: Path, tenant: str = "") -> list[Document]:
    """Returns what is used of the limits of a tenant (empty: of all); nothing, and a note, where no router answers."""
    try:
        return _read(home, tenant)
    except WeftError as error:
        note(f"no router answers: what is used of limits is not known ({error.message})")
        return []


def _read(home: Path, tenant: str = "") -> list[Document]:
    with connect(home) as api:
        return list(api.get("/v1/admin/limit-uses", tenant=tenant)["items"])


class KnownUses:
    """The windows of limits of tenants that a router knows while no registry answers, for tables and pages."""

    def __init__(self, home: Path, error: WeftError, tenants: Collection[str] = ()) -> None:
        """`tenants`: without any, all of them. Raises `error`, the registry's, where no router answers either."""
        self._home = home
        self._error = error
        self._tenants = tenants
        try:
            self._first = self._known()
        except WeftError:
            raise error from None

    def show(self, output: ResourceFormat) -> None:
        """Prints them as a table."""
        _WINDOWS.print(self._first, output)
        self._note("")

    def follow(self, output: ResourceFormat) -> None:
        """Prints them as a table, then each one that changes, until Ctrl-C."""
        self._note("; the registry is not waited for")
        poll_records(_WINDOWS, output, self._known)

    def page(self) -> str:
        """Returns those of one tenant as a page. Raises the registry's error where there are none."""
        if not self._first:
            raise self._error
        self._note("")
        return "\n".join(
            (*page((Column("Name", "tenant"),), self._first[0]), *table_block("Used", USES, self._first), "")
        )

    def _known(self) -> list[Document]:
        return [use for use in _read(self._home) if not self._tenants or use["tenant"] in self._tenants]

    def _note(self, more: str) -> None:
        note(
            "no registry answers: declarations of tenants (weight, source, tenants without a limit) are not known, "
            f"these are the limits that a router counts{more} ({self._error.message})"
        )


def used_text(uses: Sequence[Document]) -> str:
    """The fullest windows of a tenant that count something, as one text such as "12 of 100 req/min"."""
    found = sorted((use for use in uses if use["used"]), key=lambda use: use["used"] / use["limit"], reverse=True)
    shown = [f"{use['used']} of {rate_of(use)}{_subject(use)}" for use in found[:MAX_SHOWN_USES]]
    return ", ".join(shown) + (f" and {len(found) - MAX_SHOWN_USES} more" if len(found) > MAX_SHOWN_USES else "")


def rate_of(use: Document) -> Rate:
    """The rate of a window."""
    unit = RateUnit.TOKENS if use["unit"] == "tokens" else RateUnit.REQUESTS
    return Rate(use["limit"], int(use["windowSeconds"]), unit)


def _subject(use: Document) -> str:
    parts = [f" by {actor_words(use['key'])}" if "key" in use else "", f" for {use['model']}" if "model" in use else ""]
    return "".join([*parts, f" of client {use['client']}" if "client" in use else ""])


USES = (
    Column("LIMIT", lambda use: str(rate_of(use))),
    Column("OF", lambda use: _subject(use).strip() or "the tenant"),
    Column("USED", "used"),
    Column("LEFT", lambda use: str(max(0, use["limit"] - use["used"]))),
    Column("EMPTY IN", lambda use: f"{wait_words(use['resetSeconds'])} s" if use["used"] else "-", ticks=True),
)
"""The columns of windows on a page."""
_COLUMNS = (Column("TENANT", "tenant"), *USES)
_WINDOWS = Listing(
    columns=_COLUMNS,
    wide=_COLUMNS,
    name=lambda use: f"{use['tenant']} {rate_of(use)}{_subject(use)}",
    empty="the router counts no limit of such a tenant",
)
