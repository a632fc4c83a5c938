"""The descriptor: what weft finds by the entry point."""

from weft.extension import ApiHook, CommandHook, Extension

EXTENSION = Extension(
    name="greeting",
    summary="Greets over HTTP and in a terminal.",
    docs="https://example.com/weft-greeting",
    apis=(ApiHook(place="weft_greeting.api:API", paths=("/x/greeting",)),),
    commands=(CommandHook(words="mesh greet", place="weft_greeting.command:greet", summary="Print a greeting."),),
)
