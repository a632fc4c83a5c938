"""The metrics, read from the calls and tables that define them in the source, without running it."""

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

ROOT = Path(__file__).parents[3]
SOURCES = ("gateway", "registry_svc", "router_svc", "runner_svc", "weft/kernel", "weft_app", "weft_extensions")
_NAME = re.compile(r"(?:weft|gen_ai)_[a-z_]+")
_QUOTED = re.compile(rf'"{_NAME.pattern}"')
"""What a source that defines metrics has in its text. Parsing the others takes seconds."""
_FUNCTION = (ast.FunctionDef, ast.AsyncFunctionDef)
_HEAD = """# Metrics

`GET /metrics` of a gateway, or of the [admin port](../observe.md#an-admin-port) of any process, is a page for
Prometheus. Counters have the suffix `_total`, histograms `_bucket`, `_sum` and `_count`. Engine metrics (`vllm:*`,
`llamacpp:*`, ...) keep their names and get the labels `model` and `runner`; so does each metric of a runner on the
page of `weft up`. With `router.usage.tenant_metrics` the usage metrics have the label `tenant`.

Every process also has `process_cpu_seconds_total`, `process_resident_memory_bytes`, `process_virtual_memory_bytes`,
`process_start_time_seconds`, `process_open_fds` and `process_max_fds`.
"""


@dataclass(frozen=True, slots=True, order=True)
class DefinedMetric:
    """A metric as its definition writes it."""

    name: str
    meaning: str
    labels: tuple[str, ...]


def defined_metrics() -> list[DefinedMetric]:
    """Returns every metric by name."""
    found: dict[str, DefinedMetric] = {}
    for package in SOURCES:
        for path in sorted((ROOT / package).rglob("*.py")):
            text = path.read_text("utf-8")
            if _QUOTED.search(text):
                for each in metrics_of(text):
                    found.setdefault(each.name, each)
    return sorted(found.values())


def metrics_of(text: str) -> Iterator[DefinedMetric]:
    """Yields the metrics that a source defines: a name and its meaning beside it."""
    tree = ast.parse(text)
    constants = {
        target.id: node.value
        for node in ast.walk(tree)
        if isinstance(node, ast.Assign)
        for target in node.targets
        if isinstance(target, ast.Name)
    }
    for scope in [*(node for node in ast.walk(tree) if isinstance(node, _FUNCTION)), tree]:
        shared = _shared_labels(scope, constants)
        for node in ast.walk(scope):
            items = node.elts if isinstance(node, ast.Tuple) else node.args if isinstance(node, ast.Call) else []
            texts = [each.value if isinstance(each, ast.Constant) else None for each in items]
            for index, (name, meaning) in enumerate(pairwise(texts)):
                if isinstance(name, str) and isinstance(meaning, str) and _NAME.fullmatch(name) and " " in meaning:
                    following = items[index + 2] if isinstance(node, ast.Call) and len(items) > index + 2 else None
                    labels = _labels(following, constants) if following else shared
                    yield DefinedMetric(name, meaning, labels)


def _shared_labels(scope: ast.AST, constants: dict[str, ast.expr]) -> tuple[str, ...]:
    """Returns the labels of the calls that define metrics from a table: `page.gauge(name, meaning, labels, ...)`."""
    for call in ast.walk(scope):
        if isinstance(call, ast.Call) and len(call.args) > 2 and _is_from_table(call):
            return _labels(call.args[2], constants)
    return ()


def _is_from_table(call: ast.Call) -> bool:
    first, second = call.args[:2]
    named = isinstance(first, ast.Name | ast.Attribute) and isinstance(second, ast.Name | ast.Attribute)
    texts = [each.id if isinstance(each, ast.Name) else each.attr for each in (first, second) if named]  # type: ignore[attr-defined]
    return texts in (["name", "meaning"], ["metric", "help"])


def _labels(node: ast.expr | None, constants: dict[str, ast.expr]) -> tuple[str, ...]:
    if isinstance(node, ast.Name):
        node = constants.get(node.id)
    if isinstance(node, ast.IfExp):
        node = node.orelse
    if not isinstance(node, ast.Tuple | ast.List):
        return ()
    found: list[str] = []
    for each in node.elts:
        if isinstance(each, ast.Starred):
            found += _labels(each.value, constants)
        elif isinstance(each, ast.Constant) and isinstance(each.value, str):
            found.append(each.value)
    return tuple(found)


def page() -> str:
    """Returns the page."""
    rows = ["| metric | labels | meaning |", "|---|---|---|"]
    for each in defined_metrics():
        labels = ", ".join(f"`{label}`" for label in each.labels)
        rows.append(f"| `{each.name}` | {labels} | {each.meaning} |")
    return "\n".join((_HEAD, *rows, ""))
