"""How `weft models tune` leaves a model."""

import json
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from typer.testing import CliRunner

from runner_svc.policy.tuning import Figures, Trial, TrialEnd
from weft.kernel.errors import WeftError
from weft_app.cli import tune, tuning_run
from weft_app.cli.main import app
from weft_app.cli.tuning_run import TunedModel, TuningReport, TuningRun

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


def test_model_that_answers_nothing_is_not_measured(mesh: Mesh, monkeypatch: pytest.MonkeyPatch) -> None:
    """Regression: a receipt leaves out what is 0, and the search ended with a KeyError."""
    receipt = {"promptTokens": 100, "engineTimings": {"prefillSeconds": 2.0, "decodeSeconds": 1.0}}
    monkeypatch.setattr(mesh, "get", lambda *_, **__: {"receipt": receipt})
    search: Any = Search()
    api: Any = mesh
    with pytest.raises(WeftError, match="m reports no tokens or times of requests"):
        TuningRun(Path("home"), MODEL, search, min_agreement=0.9)._speeds(api)


def _trial(number: int, speed: float) -> Trial:
    figures = Figures(prompt_tokens_per_second=speed, output_tokens_per_second=speed)
    return Trial(number=number, settings={"threads": number}, end=TrialEnd.MEASURED, figures=figures)


def test_failed_switch_reports_the_active_profile_and_keeps_the_measurements(monkeypatch: pytest.MonkeyPatch) -> None:
    """It reported success with exit code 0, and a load that failed lost the document of the search."""
    trials = [_trial(1, 10.0), _trial(2, 20.0)]
    report = TuningReport(model=MODEL, trials=trials, present=trials[0], best=trials[1])
    step = {"step": "load", "model": "m", "problem": "no runner has it"}
    api = SimpleNamespace(
        get=lambda *_: {"name": "m-before-tune"}, put=lambda *_: None, post=lambda *_: {"steps": [step]}
    )
    for name, fake in {
        "find_model": lambda *_: MODEL,
        "TuningSearch": lambda *_: None,
        "TuningRun": lambda *_, **__: SimpleNamespace(run=lambda *_: report),
        "connect": lambda *_: nullcontext(api),
    }.items():
        monkeypatch.setattr(tune, name, fake)
    done = CliRunner().invoke(app, ["models", "tune", "m", "--apply", "-o", "json"])
    document = json.loads(done.stdout)
    assert (done.exit_code, document["applied"], len(document["trials"])) == (1, False, 2)
    assert "weft: cannot load m: no runner has it; profile/m-tuned is active, undo it with: " in done.stderr
    assert done.stderr.endswith("weft mesh profile switch m-before-tune\n")


def test_profiles_of_models_with_long_names_replaced_each_other() -> None:
    names = {name for model in ("0", "1") for name in tune._names(f"{'a' * 50}-{model}")}
    assert len(names) == 4
    assert max(map(len, tune._names("b" * 128))) == 128
