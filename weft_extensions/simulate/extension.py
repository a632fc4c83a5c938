"""`weft mesh simulate`: the router's scheduler in virtual time, for planning of capacity."""

from weft.extension import CommandHook, Extension

EXTENSION = Extension(
    name="simulate",
    summary="Simulate a mesh in virtual time: waits, throughput, refusals and the cost of model swaps.",
    docs="docs/trouble.md",
    commands=(
        CommandHook(
            words="mesh simulate",
            place="weft_extensions.simulate.command:simulate",
            summary="Simulate a mesh: waits, throughput, refusals and the cost of model swaps.",
        ),
    ),
)
