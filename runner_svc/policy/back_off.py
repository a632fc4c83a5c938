"""How long to wait before the next try."""

FIRST_PAUSE_SECONDS = 0.1
MAX_PAUSE_SECONDS = 5.0
MAX_DOUBLINGS = 16


def retry_pause_seconds(failures: int, jitter: float) -> float:
    """The pause after that many failures in a row; `jitter` (0 to 1) places it between one half of it and all of it.

    Without jitter a thousand runners would come back to a registry in the same moment.
    """
    doublings = max(0, min(failures - 1, MAX_DOUBLINGS))
    full = min(FIRST_PAUSE_SECONDS * (1 << doublings), MAX_PAUSE_SECONDS)
    return full * (0.5 + jitter / 2)
