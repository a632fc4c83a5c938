"""Starts `weft` warm, with the fake library for cards where programs look for the real one."""

import json
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
from fake_cards_stage import GIB, Stage
from kit import warm_python
from kit.home_gateway import home_gateway
from kit.warm_python import IS_POSSIBLE, WarmStart
from ledger_home import LedgerHome, ledger_home
from scripted_ledger import Script, scripted_ledger

from weft_testing.fake_nvml import fake_nvml_library
from weft_testing.shared_library import compiler

_programs = WarmStart()
"""Programs of this server search the folder of the fake library, which is decided when a process begins."""


@pytest.fixture(autouse=True, scope="module")
def warm_programs(request: pytest.FixtureRequest) -> Iterator[None]:
    """Pays for the imports of `weft` once, and in no test."""
    with pytest.MonkeyPatch.context() as patch:
        if IS_POSSIBLE and compiler() is not None and {"weft_command", "acquire_command"} & vars(request.module).keys():
            with pytest.MonkeyPatch.context() as environment:
                environment.setenv("LD_LIBRARY_PATH", str(fake_nvml_library().parent))
                _programs.server()
            patch.setattr(warm_python, "_warm_start", _programs)
        yield


@pytest.fixture
def stage(tmp_path: Path) -> Stage:
    """Two cards of 8 GiB."""
    return Stage(tmp_path, 8 * GIB, 8 * GIB)


@pytest.fixture
async def home(tmp_path: Path, stage: Stage) -> AsyncIterator[LedgerHome]:
    """A real ledger, in the home of the stage's programs."""
    async with ledger_home(tmp_path / "home") as made:
        stage.environment["WEFT_HOME"] = str(made.home)
        yield made


@pytest.fixture
def ledger(tmp_path: Path, stage: Stage) -> Iterator[Script]:
    """A scripted ledger, in the home of the stage's programs."""
    home = tmp_path / "home"
    with scripted_ledger() as script:
        (home / "run").mkdir(parents=True)
        (home / "run" / "up.json").write_text(json.dumps({"grpc": script.target}))
        stage.environment["WEFT_HOME"] = str(home)
        with home_gateway(home, script.target):
            yield script
