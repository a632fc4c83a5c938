"""Labels of requests to routes: of the caller and of labelers, such as the one in examples/route_labeler."""

import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
from kit.runtime_plugin import write_distribution

from weft.api.common.v1.chat_pb2 import ChatPayload
from weft.dispatch.labelers import Labelers
from weft.dispatch.request_receipt import RequestContext
from weft.kernel.requests.request_values import Operation

EXAMPLE = Path(__file__).resolve().parents[3] / "examples" / "route_labeler"


@pytest.fixture(autouse=True)
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder for packages, with the example installed."""
    project = tomllib.loads((EXAMPLE / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    points = {f"weft.labelers:{name}": value for name, value in project["entry-points"]["weft.labelers"].items()}
    write_distribution(tmp_path, project["name"], project["version"], points)
    monkeypatch.syspath_prepend(str(EXAMPLE))
    monkeypatch.syspath_prepend(str(tmp_path))
    return tmp_path


def chat(text: str) -> ChatPayload:
    payload = ChatPayload()
    payload.messages.add(role="ROLE_USER").content.add(text=text)
    return payload


def context(model: str = "route/r", **facts: Any) -> RequestContext:
    return RequestContext(request_id="r-1", tenant="a", model=model, operation=Operation.CHAT, traceparent="", **facts)


@pytest.mark.parametrize(
    ("text", "label"),
    [
        ("What is the capital of France?", "easy"),
        ("Prove that there are infinitely many primes.", "hard"),
        ("word " * 2000, "hard"),
    ],
)
def test_labeler_of_the_example_labels_requests_to_routes(text: str, label: str) -> None:
    assert Labelers().labels(context(), chat(text)) == {f"difficulty={label}"}


def test_label_of_the_caller_takes_precedence() -> None:
    metadata = {"difficulty": "hard", "team": "a"}
    assert Labelers().labels(context(metadata=metadata), chat("Hi")) == {"difficulty=hard", "team=a"}


def test_request_that_is_sent_to_no_route_has_no_labels() -> None:
    assert Labelers().labels(context("qwen", metadata={"team": "a"}), chat("Hi")) == frozenset()


def test_labels_of_a_coding_agent_are_sent_for_every_target_and_those_of_its_caller_take_precedence() -> None:
    labels = {"agent": "sub", "purpose": "title"}
    assert Labelers().labels(context("qwen", labels=labels), chat("Hi")) == {"agent=sub", "purpose=title"}
    found = Labelers().labels(context(labels=labels, metadata={"purpose": "turn"}), chat("Hi"))
    assert found == {"agent=sub", "purpose=turn", "difficulty=easy"}


@pytest.mark.parametrize(
    "code", ["1 / 0", "return {'two words': 'x'}", "return {'a': ''}", "return {str(n): 'x' for n in range(99)}"]
)
def test_labeler_that_fails_or_returns_no_labels_adds_none(
    site: Path, monkeypatch: pytest.MonkeyPatch, code: str
) -> None:
    (site / "broken_labeler.py").write_text(f"def labels_of(prompt):\n    {code}\n")
    (site / "unimportable_labeler.py").write_text("import nothing_of_this_name\n")
    points = {f"weft.labelers:{name}": f"{name}_labeler:labels_of" for name in ("broken", "unimportable")}
    write_distribution(site, "broken-labelers", "1", points)
    monkeypatch.delitem(sys.modules, "broken_labeler", raising=False)
    assert Labelers().labels(context(), chat("Hi")) == {"difficulty=easy"}


def test_labelers_add_no_more_labels_together_than_a_router_takes(site: Path) -> None:
    """Regression: the limit applied to each, so a router refused every request to a route."""
    for letter in "xyz":
        (site / f"{letter}_labeler.py").write_text(
            f"def labels_of(prompt):\n    return {{'{letter}' + str(n): 'x' for n in range(16)}}\n"
        )
    points = {f"weft.labelers:all_{letter}": f"{letter}_labeler:labels_of" for letter in "xyz"}
    write_distribution(site, "many-labelers", "1", points)
    metadata = {f"own-{number}": "x" for number in range(16)}
    assert len(Labelers().labels(context(metadata=metadata), chat("Hi"))) == 32
    labels = {"agent": "sub", "purpose": "turn", "program": "codex"}
    assert len(Labelers().labels(context(metadata=metadata, labels=labels), chat("Hi"))) == 35, (
        "as router_svc/placement.py"
    )
