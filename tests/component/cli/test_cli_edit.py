"""`weft config edit` with editors that are scripts, against a scripted mesh."""

import shlex
import sys
from pathlib import Path

import pytest
from cli_harness import ScriptedMesh
from cli_samples import some_model
from typer.testing import Result

from weft.api.registry.v1 import agent_pb2, alias_pb2, model_pb2
from weft.documents.resource_kinds import ResourceKind
from weft.documents.resources import declared_document
from weft.kernel.errors.error_tree import WeftError
from weft.kernel.errors.reasons import Reason

pytest_plugins = ("cli_mesh",)

EDITOR = """
import os, pathlib, signal, sys
log, steps, file = pathlib.Path(sys.argv[1]), sys.argv[2:-1], pathlib.Path(sys.argv[-1])
text = file.read_text()
turn = len(list(log.iterdir()))
(log / str(turn)).write_text(text)
what, _, by = steps[min(turn, len(steps) - 1)].partition("=>")
if what == "EXIT":
    sys.exit(3)
if what == "CTRL-C":
    os.kill(os.getppid(), signal.SIGINT)
    what, by = "Be brief.", "Be thorough."
file.write_text(text.replace(what, by) if by else text if what == "SAME" else what)
"""
"""An editor: the n-th time it makes the n-th replacement, and keeps what it was shown."""


class Editor:
    """Runs `weft config edit` with an editor that makes these changes in turn."""

    def __init__(self, folder: Path, mesh: ScriptedMesh, monkeypatch: pytest.MonkeyPatch) -> None:
        self._program = folder / "editor.py"
        self._program.write_text(EDITOR)
        self._log = folder / "shown"
        self._log.mkdir()
        self.files = folder / "files"
        self.files.mkdir()
        self._mesh = mesh
        self._monkeypatch = monkeypatch
        monkeypatch.setattr("tempfile.tempdir", str(self.files))
        monkeypatch.delenv("VISUAL", raising=False)

    def run(self, *words: str, changes: tuple[str, ...]) -> Result:
        line = shlex.join([sys.executable, str(self._program), str(self._log), *changes])
        self._monkeypatch.setenv("EDITOR", line)
        return self._mesh.run("config", "edit", *words)

    @property
    def shown(self) -> list[str]:
        return [file.read_text() for file in sorted(self._log.iterdir())]


@pytest.fixture
def editor(tmp_path: Path, mesh: ScriptedMesh, monkeypatch: pytest.MonkeyPatch) -> Editor:
    return Editor(tmp_path, mesh, monkeypatch)


@pytest.fixture
def public(mesh: ScriptedMesh) -> ScriptedMesh:
    manifest = agent_pb2.AgentManifest(name="reviewer", model="qwen", system_prompt="Be brief.")
    mesh.add(agent_pb2.Agent(manifest=manifest, kind=agent_pb2.Agent.KIND_PUBLIC))
    return mesh


def test_changed_text_is_applied_and_its_file_removed(public: ScriptedMesh, editor: Editor) -> None:
    done = editor.run("agent/reviewer", changes=("Be brief.=>Be thorough.",))
    assert (done.exit_code, done.stdout) == (0, "agent/reviewer configured\n"), done.stderr
    assert public.state.declared[ResourceKind.AGENT]["reviewer"].manifest.system_prompt == "Be thorough."
    assert declared_document(public.applied[-1].expected[0]).declared.system_prompt == "Be brief."
    assert editor.shown[0].startswith("# Edit agent/reviewer.")
    assert list(editor.files.iterdir()) == []


def test_interrupt_that_an_editor_uses_does_not_end_it(public: ScriptedMesh, editor: Editor) -> None:
    """Ctrl-C at a command of vim, such as `:!make`, killed vim, and the edits were lost."""
    done = editor.run("agent/reviewer", changes=("CTRL-C",))
    assert (done.exit_code, done.stdout) == (0, "agent/reviewer configured\n"), done.stderr
    assert public.state.declared[ResourceKind.AGENT]["reviewer"].manifest.system_prompt == "Be thorough."
    assert list(editor.files.iterdir()) == []


@pytest.mark.parametrize("change", ["SAME", "# only a comment\n"])
def test_unchanged_or_empty_text_applies_nothing_and_is_reported(
    public: ScriptedMesh, editor: Editor, change: str
) -> None:
    done = editor.run("agent", "reviewer", changes=(change,))
    assert (done.exit_code, public.applied) == (0, [])
    assert "nothing was changed" in done.stderr
    assert list(editor.files.iterdir()) == []


def test_invalid_text_reopens_with_the_error_on_top(public: ScriptedMesh, editor: Editor) -> None:
    done = editor.run("agent/reviewer", changes=("systemPrompt=>sytemPrompt", "sytemPrompt=>systemPrompt"))
    assert done.exit_code == 0, done.stderr
    first, second = editor.shown
    assert "# Not applied:" not in first
    assert "# Not applied: the edited text, document 1 (line 4): sytemPrompt: there is no such field" in second
    assert done.stdout == ""
    assert "nothing was changed" in done.stderr
    assert public.applied == []


def test_text_that_stays_invalid_is_kept_in_its_file(public: ScriptedMesh, editor: Editor) -> None:
    done = editor.run("agent/reviewer", changes=("systemPrompt=>sytemPrompt", "SAME"))
    (kept,) = editor.files.iterdir()
    assert done.exit_code == 2
    assert f"the edited text is in {kept}" in done.stderr
    assert "sytemPrompt" in kept.read_text()
    assert public.applied == []


def test_concurrent_change_is_not_overwritten_and_the_edit_is_kept(public: ScriptedMesh, editor: Editor) -> None:
    public.apply_error = WeftError(Reason.RESOURCE_CHANGED, "the agent 'reviewer' was changed")
    done = editor.run("agent/reviewer", changes=("Be brief.=>Be thorough.",))
    (kept,) = editor.files.iterdir()
    assert done.exit_code == 4
    assert "agent/reviewer was changed or deleted since it was opened; nothing was applied" in done.stderr
    assert str(kept) in done.stderr
    assert "Be thorough." in kept.read_text()
    assert kept.stat().st_mode & 0o777 == 0o600


def test_mesh_rejection_is_shown_in_the_text(public: ScriptedMesh, editor: Editor) -> None:
    public.apply_error = WeftError(Reason.MODEL_NOT_FOUND, "there is no model qwem")
    editor.run("agent/reviewer", changes=("qwen=>qwem", "SAME"))
    assert "# Not applied: there is no model qwem" in editor.shown[1]


def test_changed_name_or_kind_is_rejected(public: ScriptedMesh, editor: Editor) -> None:
    editor.run("agent/reviewer", changes=("name: reviewer=>name: other", "SAME"))
    assert "must contain only agent/reviewer" in editor.shown[1]
    assert public.applied == []


def test_failing_editor_applies_nothing(public: ScriptedMesh, editor: Editor) -> None:
    done = editor.run("agent/reviewer", changes=("EXIT",))
    assert done.exit_code == 2
    assert "ended with 3; nothing was applied" in done.stderr
    assert public.applied == []


def test_editor_with_an_open_quote_is_refused(public: ScriptedMesh, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VISUAL", "nano '")
    done = public.run("config", "edit", "agent/reviewer")
    assert (done.exit_code, done.stderr) == (2, 'weft: VISUAL: "nano \'" is no command line: No closing quotation\n')


def test_resource_owned_by_weft_yaml_is_not_opened(mesh: ScriptedMesh, editor: Editor) -> None:
    own = some_model("own")
    own.kind, own.runner = model_pb2.Model.KIND_VIRTUAL, "r1"
    mesh.add(
        own,
        alias_pb2.Alias(
            manifest=alias_pb2.AliasManifest(name="fixed", pattern="gpt-*", target="qwen"),
            source=alias_pb2.Alias.SOURCE_CONFIGURED,
        ),
    )
    for words, said in (
        (("model/own",), "published by the runner r1 from the weft.yaml of its host"),
        (("alias/fixed",), "in the mesh's weft.yaml (registry.aliases)"),
        (("runner/r1",), "a runner registers itself"),
        (("pool/big",), "a pool is defined by its models"),
    ):
        done = editor.run(*words, changes=("SAME",))
        assert done.exit_code in (2, 4)
        assert said in done.stderr
    assert editor.shown == []
    done = editor.run("model/own", "--adopt", changes=(f"name: own=>name: own\ndigest: sha256:{'a' * 64}",))
    assert done.stdout == "model/own configured\n", editor.shown
    assert mesh.applied[-1].adopt
