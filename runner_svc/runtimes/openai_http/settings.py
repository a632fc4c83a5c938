"""The settings of a model of a server that runs already in `weft.yaml`."""

from dataclasses import dataclass, field
from typing import Annotated

from annotated_types import Ge, Le, MaxLen

from runner_svc.runtimes.settings import SleepingModelSettings, UpstreamSettings
from weft.kernel.request import Operation, OperationName
from weft.kernel.settings import PUBLIC, SECRET

ATTACHED_SLOTS = 64
"""Requests at once of a server that does not say how many it works on: it has a queue of its own."""
MAX_ATTACHED_SLOTS = 4096
"""Maximum number of requests at once, also of a server that says that it works on more."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenAiHttpModel(UpstreamSettings, SleepingModelSettings):
    """A model of an OpenAI-compatible server that runs already."""

    url: Annotated[str, MaxLen(2048), PUBLIC, SECRET] = field(repr=False)
    """Base URL of the server, such as `http://127.0.0.1:11434/v1`."""
    slots: Annotated[int, Ge(0), Le(MAX_ATTACHED_SLOTS), PUBLIC] = 0
    """Requests that it is sent at once, where the server does not say that it works on fewer. 0: as many as it says, at
    most 4096; 64 where it does not say."""
    remote: bool | None = None
    """Whether serving it sends bytes off the premises. It must be set where the address of the server is not one of a
    network of your own."""
    embeddings: bool | None = None
    """Whether it also gives embeddings. Default: yes."""
    operations: Annotated[tuple[OperationName, ...], MaxLen(len(Operation)), PUBLIC] = ()
    """What the server offers, such as `[chat, tokenize]`. Default: `[chat, completion, embedding]`."""
    cache_salt: bool = False
    """Whether the server knows `cache_salt`, as vLLM does. It is then sent with every request, so that tenants share no
    cached prefixes; without it weft cannot keep them apart there."""

    @property
    def location(self) -> str:
        """Whose server it is: its address is not shown."""
        return "a server that runs already"
