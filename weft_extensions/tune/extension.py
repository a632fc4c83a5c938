"""`weft models tune`: the best load parameters of a model for its machine."""

from weft.extension import CommandHook, Extension

_SUMMARY = "Find the best load parameters of a model for its machine, by measuring while it is idle."
EXTENSION = Extension(
    name="tune",
    summary=_SUMMARY,
    docs="docs/models.md",
    commands=(CommandHook(words="models tune", place="weft_extensions.tune.command:tune", summary=_SUMMARY),),
)
