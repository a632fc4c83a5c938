"""Starts `weft` warm, with the fake library for cards where programs look for the real one."""

from collections.abc import Iterator

import pytest
from kit import warm_python
from kit.warm_python import IS_POSSIBLE, WarmStart

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
