"""Which endpoints a request may go to: the subset that its gateway names, and the choice of conformance tests. Pure."""

from collections.abc import Mapping

from gateway.picker.session import Headers
from weft.api.envoy.v1 import base_pb2
from weft.dispatch.placement import MAX_ONLY_RUNNERS
from weft.kernel.errors import WeftError
from weft.kernel.lane_names import SUBSET, SUBSET_NAMESPACE
from weft.kernel.reasons import Reason
from weft.kernel.value import value_class

TEST_SELECTION = b"test-epp-endpoint-selection"
"""Header of a request in the conformance tests of gateways: addresses, or addresses with ports, separated by commas."""


@value_class()
class Allowed:
    """Endpoints that a request may go to."""

    subset: frozenset[str] | None = None
    """Those that the gateway names, `ip:port` each; None: it names none, and all are meant."""
    tested: frozenset[str] | None = None
    """Those that a conformance test chooses, `ip` or `ip:port`; None: it chooses none."""

    @property
    def are_all(self) -> bool:
        """Whether every endpoint is allowed."""
        return self.subset is None and self.tested is None

    def has(self, endpoint: str) -> bool:
        """Whether an endpoint `ip:port` is allowed."""
        if self.subset is not None and endpoint not in self.subset:
            return False
        return self.tested is None or not self.tested.isdisjoint((endpoint, endpoint.rpartition(":")[0]))


ANYWHERE = Allowed()


def allowed_in(metadata: base_pb2.Metadata, headers: Headers, *, obeys_tests: bool) -> Allowed:
    """Returns what a request's metadata and headers allow; `obeys_tests`: also by the header of conformance tests."""
    subset = _subset_in(metadata)
    if not obeys_tests:
        return ANYWHERE if subset is None else Allowed(subset=subset)
    tested = next((value for name, value in headers if name == TEST_SELECTION), None)
    return Allowed(subset=subset, tested=None if tested is None else _parts(tested.decode("latin-1")))


def _subset_in(metadata: base_pb2.Metadata) -> frozenset[str] | None:
    known = metadata.filter_metadata
    if SUBSET_NAMESPACE not in known or SUBSET not in known[SUBSET_NAMESPACE].fields:
        return None
    value = known[SUBSET_NAMESPACE].fields[SUBSET]
    if value.WhichOneof("kind") == "list_value":
        return frozenset(each.string_value.strip() for each in value.list_value.values)
    return _parts(value.string_value)


def _parts(text: str) -> frozenset[str]:
    return frozenset(part.strip() for part in text.split(",") if part.strip())


def allowed_runners(endpoints: Mapping[str, frozenset[str]], allowed: Allowed) -> frozenset[str]:
    """Returns the runners at allowed endpoints, by name; `endpoints` are those of each runner and its engines.

    Empty: every runner is allowed. Raises NO_RUNNER_AVAILABLE where none is.
    """
    found = frozenset(runner for runner, its in endpoints.items() if any(map(allowed.has, its)))
    if not found:
        # The addresses of runners are no business of callers.
        words = "none of the endpoints that the gateway allows is one of the mesh's runners"
        raise WeftError(Reason.NO_RUNNER_AVAILABLE, words)
    if len(found) == len(endpoints):
        return frozenset()
    return frozenset(sorted(found)[:MAX_ONLY_RUNNERS])
