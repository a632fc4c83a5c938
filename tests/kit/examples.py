"""How many examples a property test tries: few while one works, many in `make test-all`."""

import os

QUICK = 25


def examples(thorough: int, quick: int = QUICK) -> int:
    """`thorough` with WEFT_TESTS=all, else `quick` at most."""
    return thorough if os.environ.get("WEFT_TESTS") == "all" else min(quick, thorough)
