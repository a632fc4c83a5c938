"""The previous release for tests: from the repository's history, or from a wheel that is named."""

import zipfile
from pathlib import Path

import pytest
from kit import previous_release
from kit.previous_release import WHEEL_VARIABLE, install_previous_release, recorded_commit


def test_recorded_commit_is_a_full_hash() -> None:
    assert len(recorded_commit()) == 40
    assert set(recorded_commit()) <= set("0123456789abcdef")


@pytest.mark.slow("installs a wheel")
def test_given_wheel_is_installed_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wheel = tmp_path / "weft-0.0.9-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("weft/__init__.py", '__version__ = "0.0.9"\n')
    monkeypatch.setenv(WHEEL_VARIABLE, str(wheel))
    installed = install_previous_release(tmp_path)
    assert installed.evaluate("import weft", "weft.__version__") == "0.0.9"
    assert installed.evaluate("import importlib.util", "importlib.util.find_spec('registry_svc')") == "None"
    assert installed.evaluate("import grpc", "bool(grpc.__version__)") == "True"


def test_tests_are_skipped_with_a_reason_without_the_commit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(WHEEL_VARIABLE, raising=False)
    monkeypatch.setattr(previous_release, "recorded_commit", lambda: "0" * 40)
    with pytest.raises(pytest.skip.Exception, match=f"0{{12}}, is not here.*{WHEEL_VARIABLE}"):
        install_previous_release(tmp_path)
