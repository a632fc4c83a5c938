"""Declaring resources with `weft` against a real mesh, and applying what it shows."""

import json
from collections.abc import Iterator
from typing import Any

import pytest
from jsonschema import Draft202012Validator
from mesh_process import (
    MeshProcess,
    fake_runner,
    running_mesh,
    write_config,
)
from typer.testing import CliRunner

from weft.documents.schemas import schemas
from weft_app.cli.main import app

SOME_OF_EVERYTHING = """\
kind: model
name: cloud
poolName: big
operations: [chat, embedding]
contextTokens: 4096
digest: sha256:0000000000000000000000000000000000000000000000000000000000000000
remote: true
skills: [text, image]
wake:
  byMesh: {type: http, url: "http://127.0.0.1:1/wake", headers: {Authorization: "Bearer ${WEFT_WAKE_TOKEN}"}}
  maxWaitSeconds: 90
---
kind: model
name: pinned
runner: a
wake:
  byRunner: true
  byMesh: {type: wake_on_lan, macAddress: "00:11:22:33:44:55"}
---
kind: agent
name: reviewer
pool: big
description: "Reviews 2026-01-01 - ünïcode"
systemPrompt: |
  Line one.
    Indented, with: a colon # and no comment
  Last.
defaultParams: {max_tokens: 7, temperature: 0, stop: ["\\n", "END"], seed: -5, logit_bias: {5: 1.5}}
---
kind: agent
name: coder-2
model: m-a
---
kind: Route
name: summaries
description: Short ones
candidates: [m-a, big]
budgetSeconds: 90.5
keepAlive: 5m
pinPrimary: true
---
kind: route
name: drafts
candidates: [pool]
"""


@pytest.fixture(scope="module")
def mesh(tmp_path_factory: pytest.TempPathFactory) -> Iterator[MeshProcess]:
    folder = tmp_path_factory.mktemp("declarative")
    runner = fake_runner("a")
    runner["agents"] = [
        {"name": "coder", "model": "m-a", "system_prompt": "Be terse.", "default_params": {"temperature": 0.5}}
    ]
    with running_mesh(folder / "home", "--config", str(write_config(folder, runner, fake_runner("b")))) as mesh:
        yield mesh


def _weft(mesh: MeshProcess, *arguments: str, stdin: str = "") -> tuple[int, str, str]:
    """A command to its end as `run_weft` does, but in this process: a test has many."""
    result = CliRunner().invoke(app, arguments, input=stdin, env={"WEFT_HOME": str(mesh.home), "COLUMNS": "200"})
    return result.exit_code, result.stdout, result.stderr


@pytest.fixture(autouse=True)
def _nothing_is_left(mesh: MeshProcess) -> Iterator[None]:
    yield
    declared = ("agent/reviewer", "agent/coder-2", "route/summaries", "route/drafts", "model/cloud", "model/pinned")
    code, _, error = _weft(mesh, "delete", *declared, "--ignore-not-found")
    assert code == 0, error


def _apply(mesh: MeshProcess, text: str, *options: str) -> tuple[int, str, str]:
    return _weft(mesh, "apply", "-f", "-", *options, stdin=text)


def _get(mesh: MeshProcess, *words: str) -> Any:
    code, out, error = _weft(mesh, "get", *words, "-o", "json")
    assert code == 0, error
    return json.loads(out)


def test_apply_reports_created_then_unchanged_then_configured(mesh: MeshProcess) -> None:
    code, out, error = _apply(mesh, SOME_OF_EVERYTHING)
    assert (code, {line.split()[1] for line in out.splitlines()}) == (0, {"created"}), error
    code, out, _ = _apply(mesh, SOME_OF_EVERYTHING)
    assert (code, {line.split()[1] for line in out.splitlines()}) == (0, {"unchanged"})
    changed = SOME_OF_EVERYTHING.replace("contextTokens: 4096", "contextTokens: 8192")
    code, out, _ = _weft(mesh, "config", "diff", "-f", "-", stdin=changed)
    assert code == 1
    assert "-contextTokens: 4096\n+contextTokens: 8192\n" in out
    code, out, _ = _apply(mesh, changed)
    assert out.splitlines() == [
        "model/cloud configured",
        "model/pinned unchanged",
        "agent/reviewer unchanged",
        "agent/coder-2 unchanged",
        "route/summaries unchanged",
        "route/drafts unchanged",
    ]
    cloud = _get(mesh, "model", "cloud")
    assert (cloud["contextTokens"], cloud["status"]["kind"], cloud["remote"]) == (8192, "public", True)
    assert cloud["wake"]["byMesh"]["headers"] == {"Authorization": "Bearer ${WEFT_WAKE_TOKEN}"}
    reviewer = _get(mesh, "agent", "reviewer")
    assert reviewer["systemPrompt"] == "Line one.\n  Indented, with: a colon # and no comment\nLast.\n"
    assert reviewer["defaultParams"]["temperature"] == 0


@pytest.mark.parametrize("output", ["yaml", "json"])
@pytest.mark.parametrize("kind", ["models", "agents", "runners", "pools", "routes"])
def test_output_of_get_applies_without_a_change(mesh: MeshProcess, kind: str, output: str) -> None:
    assert _apply(mesh, SOME_OF_EVERYTHING)[0] == 0
    _, names, _ = _weft(mesh, "get", kind, "-o", "name")
    assert len(names.splitlines()) >= 2
    for words in ((kind,), (names.splitlines()[0],), (names.splitlines()[-1],)):
        code, got, error = _weft(mesh, "get", *words, "-o", output)
        assert code == 0, error
        code, out, error = _apply(mesh, got)
        assert code == 0, error
        assert {line.split()[1] for line in out.splitlines()} == {"unchanged"}


@pytest.mark.parametrize("kind", ["model", "agent", "runner", "pool", "route"])
def test_json_output_of_a_real_mesh_matches_the_published_schemas(mesh: MeshProcess, kind: str) -> None:
    assert _apply(mesh, SOME_OF_EVERYTHING)[0] == 0
    Draft202012Validator(schemas()[f"{kind}-list.json"]).validate(_get(mesh, f"{kind}s"))
    code, out, _ = _weft(mesh, "events", kind, "-o", "json")
    assert code == 0
    Draft202012Validator(schemas()["event-list.json"]).validate(json.loads(out))
