import importlib
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from weft.kernel.bare_package import place_bare


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    folder = tmp_path / "laden"
    folder.mkdir()
    (folder / "__init__.py").write_text("from laden.heavy import weight\nfrom laden.part import size\n")
    (folder / "part.py").write_text("from . import unit\nsize = unit.unit\n")
    (folder / "unit.py").write_text("unit = 1\n")
    (folder / "heavy.py").write_text("weight = 1_000\n")
    monkeypatch.syspath_prepend(tmp_path)
    yield "laden"
    for name in [name for name in sys.modules if name.partition(".")[0] == "laden"]:
        del sys.modules[name]


def loaded() -> set[str]:
    return {name for name in sys.modules if name.partition(".")[0] == "laden"}


def test_a_part_of_a_bare_package_is_loaded_without_the_others(package: str) -> None:
    place_bare(package)
    assert importlib.import_module("laden.part").size == 1
    assert loaded() == {"laden", "laden.part", "laden.unit"}


def test_a_package_that_is_not_placed_bare_loads_all_of_it(package: str) -> None:
    importlib.import_module(f"{package}.part")
    assert "laden.heavy" in loaded()


def test_a_name_of_a_bare_package_itself_loads_all_of_it(package: str) -> None:
    place_bare(package)
    part = importlib.import_module("laden.part")
    laden = importlib.import_module(package)
    assert laden.weight == 1_000
    assert laden.part is part
    assert "laden.heavy" in loaded()


def test_a_bare_package_lacks_what_the_whole_one_lacks(package: str) -> None:
    place_bare(package)
    with pytest.raises(AttributeError):
        _ = importlib.import_module(package).nothing


def test_a_package_that_was_loaded_before_stays_as_it_is(package: str) -> None:
    whole = importlib.import_module(package)
    place_bare(package)
    assert sys.modules[package] is whole
