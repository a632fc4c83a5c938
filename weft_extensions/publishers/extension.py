"""Publishers: programs in any language that serve models over plain HTTP."""

from weft.extension import Extension, ListenerHook

EXTENSION = Extension(
    name="publishers",
    summary="Publishers: programs in any language that serve models to the mesh over plain HTTP.",
    docs="docs/laptops.md#publishers-over-http",
    listeners=(
        ListenerHook(
            setting="publishers.listen",
            place="weft_extensions.publishers.publisher_http:publisher_listener",
            label="publish",
            summary="programs register over HTTP",
        ),
    ),
)
