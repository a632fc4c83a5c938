"""What the MODEL of `weft run` names: a file that is there, a source, or a name of the mesh."""

from pathlib import Path
from typing import Any

import pytest
from typing_extensions import override

from weft.kernel.errors.error_tree import FieldError, WeftError
from weft.kernel.errors.reasons import Reason
from weft_app.cli.asked_model import AskedModel, asked_model
from weft_app.cli.mesh_api import MeshApi
from weft_app.cli.operations import begin


class NoModels(MeshApi):
    """A mesh without models."""

    def __init__(self) -> None:
        pass

    @override
    def post(self, *_: object, **__: object) -> Any:
        raise WeftError(Reason.MODEL_NOT_FOUND, "there is no model")


@pytest.mark.parametrize(
    ("text", "asked"),
    [
        ("qwen", AskedModel(name="qwen")),
        ("llama3.2:3b", AskedModel(name="llama3.2:3b")),
        ("agent/coder", AskedModel(name="agent/coder")),
        ("route/summaries", AskedModel(name="route/summaries")),
        ("hf:acme/tiny:Q4_K_M", AskedModel(source="hf:acme/tiny:Q4_K_M")),
        ("acme/tiny", AskedModel(source="hf:acme/tiny")),
        ("hf.co/acme/tiny", AskedModel(source="hf:acme/tiny")),
        ("https://host/tiny.gguf", AskedModel(source="https://host/tiny.gguf")),
        ("ollama:llama3.2", AskedModel(source="ollama:llama3.2:latest")),
        ("/models/tiny.gguf", AskedModel(source="/models/tiny.gguf")),
        ("absent.gguf", AskedModel(name="absent.gguf")),
        ("accounts/acme/models/tiny", AskedModel(name="accounts/acme/models/tiny")),
    ],
)
def test_argument_is_a_name_or_a_source(text: str, asked: AskedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir("/")
    assert asked_model(text) == asked


def test_unknown_name_with_an_owner_may_be_a_hub_repository() -> None:
    with pytest.raises(WeftError, match="there is no model; the hub's repository of this name is hf:acme/tiny"):
        begin(NoModels(), {"type": "load", "model": "acme/tiny"})


def test_relative_path_is_made_absolute_for_the_runner(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "models" / "tiny").mkdir(parents=True)
    (tmp_path / "models" / "tiny.gguf").touch()
    (tmp_path / "here.GGUF").touch()
    (tmp_path / "plain").touch()
    whole = {
        "models/tiny": tmp_path / "models" / "tiny",
        "models/tiny.gguf": tmp_path / "models" / "tiny.gguf",
        "here.GGUF": tmp_path / "here.GGUF",
        "./absent.gguf": tmp_path / "absent.gguf",
    }
    assert {text: asked_model(text).source for text in whole} == {text: str(path) for text, path in whole.items()}
    assert asked_model("plain") == AskedModel(name="plain"), "a file that is no model is a name"


def test_path_below_the_home_folder_is_expanded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    assert asked_model("~/tiny.gguf") == AskedModel(source=str(tmp_path / "tiny.gguf"))


@pytest.mark.parametrize("text", ["", "two words", "hf:acme", "http:/x"])
def test_invalid_source_error_names_the_argument(text: str) -> None:
    with pytest.raises(FieldError, match="INVALID_ARGUMENT: MODEL: "):
        asked_model(text)
