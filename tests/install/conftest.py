"""What the tests of installing share: the distributions, and the packages that one account has loaded already."""

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from distributions import ROOT, Built, build


@pytest.fixture(scope="session")
def built(tmp_path_factory: pytest.TempPathFactory) -> Built:
    folder = tmp_path_factory.mktemp("dist")
    build("--outdir", folder, ROOT)
    return Built(wheel=next(folder.glob("*.whl")), source=next(folder.glob("*.tar.gz")))


@pytest.fixture(scope="session")
def packages(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    folder = tmp_path_factory.mktemp("packages")
    yield folder
    shutil.rmtree(folder)
