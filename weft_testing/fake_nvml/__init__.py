"""A host with graphics cards that is none: a library in C that `pynvml` loads in place of NVIDIA's own.

cards = FakeCards(folder)
cards.add(total_bytes=8 * 1024**3)
program = subprocess.Popen(..., env={**os.environ, **cards.environment(build_fake_nvml(folder))})

In that program, and in everything it starts, the cards are those of `cards`.
"""

from weft_testing.fake_nvml.build import build_fake_nvml, compiler
from weft_testing.fake_nvml.folder import FakeCards, OutOfCardMemoryError

__all__ = ["FakeCards", "OutOfCardMemoryError", "build_fake_nvml", "compiler"]
