"""The policy of journaled requests: which requests are durable tasks without their callers asking for it.

A model's own setting counts first, then its caller's tenant's (as it is declared, else as it is configured), then that
of the whole mesh. Any model of a pool, a route or an agent may answer its requests, so they have the strongest mode of
those models.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

from weft.api.registry.v1.tenant_pb2 import Tenant
from weft.dispatch.agents import models_behind
from weft.dispatch.fleet import FleetSource, FleetView
from weft.dispatch.request_trace import WhenLeft
from weft.kernel.errors import FieldError
from weft.kernel.names import AUTO_MODEL
from weft.kernel.reasons import Reason
from weft.kernel.request import TASK_OPERATIONS, JournalMode, Operation, journal_in

_COUNTS_TOKENS = Operation.TOKENIZE
"""The operation that is no inference: it is never journaled."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JournalRules:
    """The modes of tenants."""

    default_tenant: JournalMode = JournalMode.UNSET
    """Of tenants that are not named."""
    tenants: Mapping[str, JournalMode] = field(default_factory=dict)

    def of_tenant(self, tenant: str) -> JournalMode:
        """Returns the mode of a tenant; UNSET if it has none."""
        return self.tenants.get(tenant, self.default_tenant)


def journal_mode(view: FleetView, name: str, of_tenant: JournalMode) -> JournalMode:
    """Returns the mode of a tenant's requests for a name: NONE, WAIT or KEEP. Pure."""
    fallback = of_tenant or journal_in(view.settings.journal) or JournalMode.NONE
    # Which model a client's profile leads to is the router's knowledge: it may be any.
    models = view.models.values() if name == AUTO_MODEL else models_behind(view, name)
    return max((model.journal or fallback for model in models), default=fallback)


class JournalPolicy:
    """Decides for each request whether it is journaled, by the newest view of the mesh."""

    def __init__(self, fleet: FleetSource, rules: JournalRules | None = None, *, is_possible: bool = True) -> None:
        """`is_possible`: whether requests can be tasks here at all."""
        self._fleet = fleet
        self._rules = rules or JournalRules()
        self._is_possible = is_possible
        self._view: FleetView | None = None
        self._has_modes = False
        """Whether a model of that view has its own mode: else no request needs its models looked up."""

    def mode_of(self, name: str, tenant: str) -> JournalMode:
        """Returns the mode of a tenant's requests for a model, pool, route or agent."""
        view = self._fleet.view
        if view is not self._view:
            self._view, self._has_modes = view, any(model.journal for model in view.models.values())
        declared = view.tenants.get(tenant)
        if declared is not None and declared.source == Tenant.SOURCE_DECLARED:
            of_tenant = journal_in(declared.manifest.journal)
        else:
            of_tenant = self._rules.of_tenant(tenant)
        if not self._has_modes:
            return of_tenant or journal_in(view.settings.journal) or JournalMode.NONE
        return journal_mode(view, name, of_tenant)

    def required(self, name: str, tenant: str, operation: Operation) -> WhenLeft | None:
        """Returns what becomes of a request whose caller leaves, where it must be journaled; None: it need not be.

        Raises UNSUPPORTED_OPERATION for one that must be and cannot.
        """
        mode = self.mode_of(name, tenant)
        if mode is JournalMode.NONE or operation is _COUNTS_TOKENS:
            return None
        if name == AUTO_MODEL:
            raise FieldError(
                "model",
                "requests for 'auto' may have to be journaled, and a task needs the name of its model, pool or route",
                Reason.UNSUPPORTED_OPERATION,
            )
        if operation not in TASK_OPERATIONS:
            raise FieldError(
                "model",
                f"requests for {name} are journaled, and a {operation.name.lower()} request cannot be; "
                f"`journal: none` of the model takes it out",
                Reason.UNSUPPORTED_OPERATION,
            )
        if not self._is_possible:
            raise FieldError(
                "model",
                f"requests for {name} are journaled, which is not possible here: send them to the endpoint of the mesh",
                Reason.UNSUPPORTED_OPERATION,
            )
        return WhenLeft.KEEP if mode is JournalMode.KEEP else WhenLeft.CANCEL
