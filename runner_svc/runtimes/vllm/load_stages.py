"""How far a load of vLLM has come, from the lines of its output. Pure."""

import re
from enum import Enum


class Stage(Enum):
    """A stage of a load, with the share of the load that is done when it begins and when the next one begins."""

    PROCESS = (0.0, 0.1)
    WEIGHTS = (0.1, 0.6)
    CACHE = (0.6, 0.75)
    GRAPHS = (0.75, 0.95)
    SERVER = (0.95, 1.0)


_SIGNS = (
    (Stage.WEIGHTS, re.compile(r"Starting to load model|Loading \w+ checkpoint shards")),
    (Stage.CACHE, re.compile(r"Loading weights took|Model loading took|Available KV cache memory|KV cache size")),
    (Stage.GRAPHS, re.compile(r"Capturing CUDA graphs|Warming up model")),
    (Stage.SERVER, re.compile(r"init engine .* took|Starting vLLM (API )?server|Application startup complete")),
)
_PERCENT = re.compile(r"(\d{1,3})%")
_ORDER = list(Stage)


class LoadStages:
    """Reads the output of one load. Its share never falls."""

    def __init__(self) -> None:
        self.stage = Stage.PROCESS
        self.share = 0.0

    def read(self, line: str) -> None:
        """Read a line of output."""
        found = next((stage for stage, sign in reversed(_SIGNS) if sign.search(line)), None)
        if found is None or _ORDER.index(found) < _ORDER.index(self.stage):
            return
        self.stage = found
        begin, end = found.value
        # A progress bar rewrites its line: the last percentage counts.
        percents = _PERCENT.findall(line)
        done = min(100, int(percents[-1])) / 100 if percents else 0.0
        self.share = max(self.share, begin + (end - begin) * done)
