"""The runtime `ngram`: the descriptor that the hook in `extension.py` names.

Keep this module cheap to import: weft imports it to read a configuration that names the runtime. What serves requests
is in `backend.py`, which `deferred` imports.
"""

from dataclasses import dataclass
from importlib.metadata import version
from typing import Annotated

from annotated_types import Ge, Gt, Le

from runner_svc.policy.parameters import EngineParameters
from runner_svc.runtimes.runtime import Requirement, Runtime, deferred
from runner_svc.runtimes.runtime_settings import Argument, StartedModelSettings
from weft.kernel.settings.setting_annotations import PathText

PARAMETERS = EngineParameters(
    engine="the n-gram server",
    untaken=frozenset({"min_p", "top_k", "top_p", "repeat_penalty", "presence_penalty", "frequency_penalty"}),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class NgramModel(StartedModelSettings):
    """A model of this runtime in weft.yaml: what weft lets every started model say, and these."""

    text: PathText
    """The text that it learns from; `~` is your home folder."""
    order: Annotated[int, Ge(1), Le(5), Argument("--order")] = 2
    """Words that the next one depends on."""
    tokens_per_second: Annotated[float, Gt(0), Le(100_000), Argument("--tokens-per-second")] = 200.0
    """How fast it writes."""

    @property
    def location(self) -> str:
        """The file."""
        return str(self.text)


RUNTIME = Runtime(
    name="ngram",
    summary="word n-grams of a text file, in a server that weft starts",
    docs="https://example.com/weft-ngram",
    settings=NgramModel,
    build=deferred("weft_ngram.backend:build"),
    parameters=PARAMETERS,
    requirement=Requirement(
        name="n-gram server", find=lambda _: f"aiohttp {version('aiohttp')}", remedy="pip install aiohttp"
    ),
    advice={"path": "this runtime learns from a text file: set text"},
)
