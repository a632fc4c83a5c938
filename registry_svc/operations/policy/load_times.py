"""How long loads take, learned from earlier ones of the same model."""

from collections import OrderedDict, deque
from statistics import median

LAST_LOADS = 5
MAX_MODELS = 10_000


class LoadTimes:
    """The last LAST_LOADS load times of at most MAX_MODELS models; the one that was loaded longest ago goes first."""

    def __init__(self) -> None:
        self._seconds: OrderedDict[str, deque[float]] = OrderedDict()

    def learn(self, model: str, seconds: float) -> None:
        """A load of `model` took so long."""
        self._seconds.setdefault(model, deque(maxlen=LAST_LOADS)).append(seconds)
        self._seconds.move_to_end(model)
        if len(self._seconds) > MAX_MODELS:
            self._seconds.popitem(last=False)

    def eta_seconds(self, model: str, spent_seconds: float) -> float | None:
        """How long a load that has taken `spent_seconds` will still take: the median of the last ones, less that.

        None: unknown, because there was none, or because it takes longer than they did.
        """
        known = self._seconds.get(model)
        if not known:
            return None
        left = median(known) - spent_seconds
        return left if left > 0 else None
