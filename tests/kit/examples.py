"""How many examples a property test tries, and under which hypothesis profile.

A property imports `given` from here: importing this module loads the profile. Hypothesis fails an example that takes
longer than 200 ms, which measures the machine and not the property; the profile sets no deadline.
"""

import os

from hypothesis import given, settings

__all__ = ["QUICK", "examples", "given"]

QUICK = 25

# The parent is the profile in use, so that what hypothesis sets where CI is set stays.
settings.register_profile("weft", settings(), deadline=None)
settings.load_profile("weft")


def examples(thorough: int, quick: int = QUICK) -> int:
    """Returns `thorough` with WEFT_TESTS=all, else at most `quick`: few in `make test`, many in `make test-all`."""
    return thorough if os.environ.get("WEFT_TESTS") == "all" else min(quick, thorough)
