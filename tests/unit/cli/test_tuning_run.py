"""How `weft models tune` leaves a model."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from weft_app.cli import tuning_run
from weft_app.cli.tuning_run import TunedModel, TuningRun

MODEL = TunedModel(
    name="m", runner="r", runtime="fake", options={}, space={"threads": (1, 2)}, elsewhere=frozenset(), was_loaded=True
)


class Search:
    """Suggests the same settings again and again."""

    def ask(self) -> dict[str, int]:
        return {"threads": 2}


class Mesh:
    """A mesh whose answer to the first load is interrupted by Ctrl-C; `done` has all that happened in it."""

    def __init__(self) -> None:
        self.done: list[str] = []
        self._load_id = ""

    def get(self, path: str, **_: Any) -> Any:
        assert path == "/v1/requests"
        return {"items": []}

    def post(self, path: str, body: Any, headers: Any) -> None:
        del body, headers
        self.done.append(path)

    def begin(self, api: "Mesh", action: Any, *, request_id: str = "") -> Any:
        assert api is self
        if action["type"] == "load" and not self._load_id:
            self._load_id = request_id
            raise KeyboardInterrupt
        return action["type"], request_id in ("", self._load_id)

    def follow(self, api: "Mesh", operation: Any, **_: Any) -> Any:
        assert api is self
        name, is_known = operation
        self.done.append(name if is_known else f"another {name}")
        return {}


@pytest.fixture
def mesh(monkeypatch: pytest.MonkeyPatch) -> Mesh:
    found = Mesh()

    @contextmanager
    def connect(*_: Any) -> Iterator[Mesh]:
        yield found

    monkeypatch.setattr(tuning_run, "QUIET_SECONDS", 0.0)
    for name, fake in {"connect": connect, "begin": found.begin, "follow": found.follow}.items():
        monkeypatch.setattr(tuning_run, name, fake)
    return found


def test_load_that_ctrl_c_interrupts_before_its_answer_ends_before_the_model_is_restored(mesh: Mesh) -> None:
    search: Any = Search()
    with pytest.raises(KeyboardInterrupt):
        TuningRun(Path("home"), MODEL, search, min_agreement=0.9).run(60.0, lambda _: None)
    assert mesh.done == ["load", "unload", "/v1/completions"]
