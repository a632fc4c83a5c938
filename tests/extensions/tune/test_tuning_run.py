"""How `weft models tune` leaves a model."""

import json
import shlex
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from runner_svc.policy.tuning import Figures, Trial, TrialEnd
from weft.documents.operation_actions import LoadSettings, load_action
from weft.kernel.errors.error_tree import WeftError
from weft.kernel.errors.reasons import Reason
from weft_app.cli import verbs
from weft_app.cli.main import app
from weft_extensions.tune import command as tune
from weft_extensions.tune import tuning_run
from weft_extensions.tune.tuning_run import TunedModel, TuningReport, TuningRun

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


def test_failed_load_names_the_command_that_undoes_it_and_keeps_the_measurements(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It reported success with exit code 0, and a load that failed lost the document of the search."""
    trials = [_trial(1, 10.0), _trial(2, 20.0)]
    report = TuningReport(model=MODEL, trials=trials, present=trials[0], best=trials[1])

    def fail(*_: Any, **__: Any) -> None:
        raise WeftError(Reason.OPERATION_REFUSED, "no runner has it")

    for name, fake in {
        "find_model": lambda *_: MODEL,
        "TuningSearch": lambda *_: None,
        "TuningRun": lambda *_, **__: SimpleNamespace(run=lambda *_: report),
        "connect": lambda *_: nullcontext(),
        "begin": fail,
    }.items():
        monkeypatch.setattr(tune, name, fake)
    done = CliRunner().invoke(app, ["models", "tune", "m", "--apply", "-o", "json"])
    document = json.loads(done.stdout)
    assert (done.exit_code, document["applied"], len(document["trials"])) == (1, False, 2)
    assert done.stderr.endswith("weft: no runner has it; load it as before with: weft unload m\n")


def test_undo_command_loads_with_the_options_of_before() -> None:
    options = {
        "contextTokens": 8192,
        "memoryBudgetMb": 512,
        "keepAlive": -1,
        "pin": True,
        "parameters": {"flash_attention": "on", "cache_prompt": True, "p_min": 0.5},
    }
    line = shlex.split(tune.undo_command(replace(MODEL, options=options)))
    assert line[:3] == ["weft", "load", "m"]
    done: list[Any] = []
    verb = typer.Typer(add_completion=False)
    verb.command()(verbs.command(verbs.load, done.append, "Load."))
    assert CliRunner().invoke(verb, line[2:]).exit_code == 0
    assert done == [load_action("m", LoadSettings.model_validate(options))]
