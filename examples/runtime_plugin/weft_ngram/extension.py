"""The extension `ngram`: what weft reads from the entry point `weft.extensions`, whenever it lists extensions."""

from weft.extension import Extension, RuntimeHook

EXTENSION = Extension(
    name="ngram",
    summary="Word n-grams of a text file as a kind of engine.",
    docs="https://example.com/weft-ngram",
    runtimes=(RuntimeHook(name="ngram", place="weft_ngram.runtime:RUNTIME"),),
)
