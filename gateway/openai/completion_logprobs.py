"""Log probabilities in the form of the legacy completion: four lists side by side."""

from collections.abc import Iterable
from dataclasses import dataclass, field

from gateway.answers.chunks import finite_logprob
from weft.api.common.v1 import event_pb2


@dataclass(slots=True)
class LogprobsWriter:
    """Counts where in a choice's text each token begins, in characters."""

    offset: int = field(default=0)

    def take(self, logprobs: Iterable[event_pb2.TokenLogprob]) -> dict[str, list[object]]:
        """The four lists for the next tokens of the choice."""
        lists: dict[str, list[object]] = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
        for entry in logprobs:
            lists["tokens"].append(entry.token)
            lists["token_logprobs"].append(finite_logprob(entry.logprob))
            lists["top_logprobs"].append({top.token: finite_logprob(top.logprob) for top in entry.top})
            lists["text_offset"].append(self.offset)
            self.offset += len(entry.token)
        return lists
