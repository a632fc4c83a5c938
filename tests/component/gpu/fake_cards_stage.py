"""Cards that are none, and programs that see them."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from weft.gpu.process import process_id_of
from weft.gpu.snapshot import ProcessId
from weft_testing.fake_nvml import FakeCards, fake_nvml_library
from weft_testing.shared_library import compiler

GIB = 1024**3
RUN_SECONDS = 60.0


needs_the_fake = pytest.mark.skipif(
    sys.platform != "linux" or compiler() is None,
    reason="needs Linux and a C compiler (cc) to build the fake library",
)


class Stage:
    """A folder with cards, and the environment that shows them to a program."""

    def __init__(self, folder: Path, *sizes: int) -> None:
        self.cards = FakeCards(folder / "cards")
        for size in sizes:
            self.cards.add(total_bytes=size)
        self.environment = {**os.environ, **self.cards.environment(fake_nvml_library())}
        self.environment.pop("CUDA_VISIBLE_DEVICES", None)

    def ask(self, code: str, *arguments: object) -> Any:
        """What a Python program prints as JSON."""
        ended = subprocess.run(
            [sys.executable, "-c", code, *map(str, arguments)],
            env=self.environment,
            capture_output=True,
            text=True,
            timeout=RUN_SECONDS,
            check=False,
        )
        assert ended.returncode == 0, ended.stderr
        return json.loads(ended.stdout)


@contextmanager
def sleeper() -> Iterator[ProcessId]:
    """A process that holds whatever a test says it does."""
    process = subprocess.Popen([sys.executable, "-S", "-c", "import time; time.sleep(120)"])
    try:
        found = process_id_of(process.pid)
        assert found is not None
        yield found
    finally:
        process.kill()
        process.wait()


def held(sight: Sequence[Any]) -> dict[int, Any]:
    """What a told sighting says of each process: [alive, bytes by device, unknown]."""
    return {pid: rest for pid, *rest in sight}
