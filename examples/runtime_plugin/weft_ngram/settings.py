"""The settings of a model of the runtime `ngram` in weft.yaml."""

from dataclasses import dataclass
from typing import Annotated

from annotated_types import Ge, Gt, Le

from runner_svc.runtimes.settings import StartedModelSettings
from weft.kernel.settings import PathText


@dataclass(frozen=True, slots=True, kw_only=True)
class NgramModel(StartedModelSettings):
    """A model of this runtime in weft.yaml: what weft lets every started model say, and these."""

    text: PathText
    """The text that it learns from; `~` is your home folder."""
    order: Annotated[int, Ge(1), Le(5)] = 2
    """Words that the next one depends on."""
    tokens_per_second: Annotated[float, Gt(0), Le(100_000)] = 200.0
    """How fast it writes."""

    @property
    def location(self) -> str:
        """The file."""
        return str(self.text)
