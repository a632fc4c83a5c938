"""The request parameters of each engine beyond those of the API."""

from collections.abc import Mapping

from runner_svc.policy.parameters import CONTROLLED_BY_MESH, OF_IMAGES, Rule
from runner_svc.runtimes.table import built_in

_HEAD = """# Engine parameters

Fields of a request that the API does not define reach the engine if its runtime lists them here. [Generation
parameters](../api.md#generation-parameters) says what happens to the others.
"""


def page() -> str:
    """Returns the page."""
    lines = [_HEAD]
    for runtime in built_in():
        if rules := runtime.parameters.allowed:
            lines += _section(runtime.name, rules)
    lines += _section("Images of servers that are not weft's", OF_IMAGES)
    lines.append("## Controlled by the mesh\n")
    lines.append("These are never sent as extra parameters, and neither is any field that starts with `x_`:\n")
    return "\n".join((*lines, ", ".join(f"`{name}`" for name in sorted(CONTROLLED_BY_MESH)) + ".", ""))


def _section(title: str, rules: Mapping[str, Rule]) -> list[str]:
    rows = [f"| `{name}` | {rule} |" for name, rule in sorted(rules.items())]
    return [f"## {title}\n", "| parameter | value |", "|---|---|", *rows, ""]
