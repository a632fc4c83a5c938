"""The stages of a start where there is no terminal: one line per change, and for a pull one per ten percent."""

import pytest

from weft.api.registry.v1.runner_pb2 import InstanceState
from weft.dispatch.fleet import FleetView, RunnerView
from weft_app.cli.stages import StageDisplay
from weft_app.compose.model_starts import Stage, pulling_stage


def view(instance: InstanceState, *, active: bool = True) -> FleetView:
    runner = RunnerView(
        name="box",
        incarnation="1",
        address="",
        host="h",
        runtime="llama_server",
        active=active,
        draining=False,
        ticket_key=b"",
        instances={"qwen": instance},
    )
    return FleetView(runners={"box": runner})


@pytest.mark.parametrize(
    ("instance", "stage"),
    [
        (
            InstanceState(detail="pulling 1.2 GiB of 4.7 GiB", load_progress=0.25),
            Stage(name="qwen", detail="pulling 1.2 GiB of 4.7 GiB on box", progress=0.25),
        ),
        (InstanceState(detail="pulling"), Stage(name="qwen", detail="pulling on box")),
        (
            InstanceState(detail="waiting for another pull of it"),
            Stage(name="qwen", detail="waiting for another pull of it on box"),
        ),
        (InstanceState(detail="loading tensors", load_progress=0.5), None),
        (InstanceState(), None),
    ],
)
def test_stage_of_a_pulled_model_is_pulling_with_its_progress(instance: InstanceState, stage: Stage | None) -> None:
    assert pulling_stage(view(instance), "qwen", "box") == stage


def test_model_of_an_offline_or_unknown_runner_has_no_pulling_stage() -> None:
    pulling = InstanceState(detail="pulling")
    assert pulling_stage(view(pulling, active=False), "qwen", "box") is None
    assert pulling_stage(view(pulling), "qwen", "other") is None
    assert pulling_stage(view(pulling), "other", "box") is None


def test_pull_prints_a_line_per_ten_percent_and_one_at_its_end(capsys: pytest.CaptureFixture[str]) -> None:
    with StageDisplay(total=1) as display:
        display.show(Stage(name="qwen", detail="loading on box"))
        for percent in range(0, 100, 3):
            detail = f"pulling {percent} MiB of 100 MiB on box"
            display.show(Stage(name="qwen", detail=detail, progress=percent / 100))
        display.show(Stage(name="qwen", detail="ready on box", done=True))
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "...  qwen: loading on box"
    assert lines[1] == "...  qwen: pulling 0 MiB of 100 MiB on box (0 %)"
    assert lines[2] == "...  qwen: pulling 12 MiB of 100 MiB on box (12 %)"
    assert lines[-1] == "ok   qwen: ready on box"
    assert len(lines) == 12
