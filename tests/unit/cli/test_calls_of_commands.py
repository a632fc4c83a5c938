"""What commands ask of the HTTP API, and what they make of unusual answers."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from weft.kernel.errors import WeftError
from weft.kernel.reasons import Reason
from weft_app.cli import records, secrets, status
from weft_app.cli.main import app
from weft_app.cli.options import EXIT_OK


class _Api:
    """Answers each read, and refuses each deletion with NOT_FOUND."""

    def __init__(self, answer: dict[str, Any] | WeftError) -> None:
        self.reads: list[tuple[str, dict[str, Any]]] = []
        self._answer = answer

    def get(self, path: str, **query: Any) -> dict[str, Any]:
        self.reads.append((path, query))
        if isinstance(self._answer, WeftError):
            raise self._answer
        return self._answer

    def delete(self, path: str, **_: Any) -> None:
        raise WeftError(Reason.NOT_FOUND, f"there is no {path}")

    def connect(self) -> Callable[[Path], AbstractContextManager["_Api"]]:
        @contextmanager
        def connect(_: Path) -> Iterator[_Api]:
            yield self

        return connect


def test_missing_secret_is_ignored_without_permission_to_list_secrets(monkeypatch: pytest.MonkeyPatch) -> None:
    api = _Api(WeftError(Reason.PERMISSION_DENIED, "this key may not list secrets"))
    monkeypatch.setattr(secrets, "connect", api.connect())
    deleted = CliRunner().invoke(app, ["delete", "secret", "gone", "--ignore-not-found"])
    assert (deleted.exit_code, deleted.output) == (EXIT_OK, "")
    assert api.reads == []


@pytest.mark.parametrize(("tenants", "asked"), [({"acme"}, "acme"), ({"acme", "other"}, ""), (set[str](), "")])
def test_limits_of_one_tenant_are_read_without_those_of_others(
    monkeypatch: pytest.MonkeyPatch, tenants: set[str], asked: str
) -> None:
    api = _Api({"items": [{"tenant": "acme"}]})
    monkeypatch.setattr(records, "connect", api.connect())
    assert records.read_uses(Path(), tenants) == [{"tenant": "acme"}]
    assert api.reads == [("/v1/admin/limit-uses", {"tenant": asked})]


@pytest.mark.parametrize(
    ("answer", "components"),
    [({}, []), ({"components": [{}]}, [{"name": "", "state": "", "reason": "", "message": "", "since": ""}])],
)
def test_health_without_fields_of_this_release_is_shown(
    answer: dict[str, Any], components: list[dict[str, str]]
) -> None:
    found = status._health("mesh", lambda: answer)
    assert found == {"process": "mesh", "status": "", "message": "", "components": components}
