"""The presets of server programs."""

from collections.abc import Callable, Iterable, Mapping

from runner_svc.runtimes.server.presets import PRESETS, ServerPreset
from weft.kernel.requests.request_values import Operation


def _code(words: Iterable[str]) -> str:
    return ", ".join(f"`{word}`" for word in words) or "-"


def _names(operations: Iterable[Operation]) -> str:
    return ", ".join(sorted(operation.name.lower() for operation in operations)) or "-"


def _yes(value: bool) -> str:
    return "yes" if value else "no"


def _wake(preset: ServerPreset) -> str:
    route = (preset.wake or preset.load) if preset.sleep else None
    return "" if route is None else route.path


_ROWS: Mapping[str, Callable[[ServerPreset], str]] = {
    "read at version": lambda preset: preset.version,
    "variable of the key": lambda preset: _code([preset.key_variable] if preset.key_variable else []),
    "ready when it answers": lambda preset: _code([preset.health_path]),
    "offers": lambda preset: _names(preset.operations),
    "with other models": lambda preset: _names(preset.other_operations),
    "counts tokens of streams": lambda preset: _yes(preset.usage_in_streams),
    "counts cached tokens": lambda preset: _yes(preset.cached_tokens),
    "stops for a caller who left": lambda preset: str(preset.cancellation),
    "metrics": lambda preset: _code([preset.metrics_path, *preset.metrics.all] if preset.metrics_path else []),
    "frees memory while it runs": lambda preset: _code([preset.sleep.path] if preset.sleep else []),
    "takes it again": lambda preset: _code([_wake(preset)] if _wake(preset) else []),
    "forgets prefixes": lambda preset: _code([preset.flush.path] if preset.flush else []),
    "`cache_salt`": lambda preset: _yes(preset.cache_salt),
    "thinking is in": lambda preset: _code([preset.thinking_field] if preset.thinking_field else []),
    "extra parameters": lambda preset: _code(sorted(preset.parameters.allowed)),
    "parameters left out": lambda preset: _code(sorted(preset.parameters.untaken)),
}


_HEAD = """# Presets of server programs

[Engines](../engines.md#presets) shows how to use a preset. The sources are in `runner_svc/runtimes/server/presets.py`.

"""


def page() -> str:
    """Returns the page: a table with one row per fact and one column per preset."""
    rows = [("", *(f"`{name}`" for name in PRESETS)), ("---",) * (len(PRESETS) + 1)]
    rows += [(title, *(cell(preset) for preset in PRESETS.values())) for title, cell in _ROWS.items()]
    return _HEAD + "".join(f"| {' | '.join(row)} |\n" for row in rows)
