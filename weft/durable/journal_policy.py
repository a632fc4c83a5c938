"""The policy of journaled requests: which requests become durable tasks without asking for it.

A model's own setting has precedence over that of the caller's tenant (declared, else configured) and that of the mesh.
Any model of a pool, route or agent may answer its requests, so the strongest mode of those models applies.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

from weft.api.registry.v1.tenant_pb2 import Tenant
from weft.dispatch.agents import models_behind
from weft.dispatch.fleet import FleetSource, FleetView
from weft.dispatch.request_receipt import WhenLeft
from weft.kernel.errors.error_tree import FieldError
from weft.kernel.errors.reasons import Reason
from weft.kernel.requests.request_values import TASK_OPERATIONS, JournalMode, Operation, journal_in
from weft.kernel.values.names import AUTO_MODEL

_COUNTS_TOKENS = Operation.TOKENIZE
"""Never journaled, as it is not inference."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JournalRules:
    """The modes of tenants."""

    default_tenant: JournalMode = JournalMode.UNSET
    """For tenants that are not listed."""
    tenants: Mapping[str, JournalMode] = field(default_factory=dict)

    def of_tenant(self, tenant: str) -> JournalMode:
        """Returns the mode of a tenant; UNSET if it has none."""
        return self.tenants.get(tenant, self.default_tenant)


def journal_mode(view: FleetView, name: str, of_tenant: JournalMode) -> JournalMode:
    """Returns the mode of a tenant's requests for a name: NONE, WAIT or KEEP. Pure."""
    fallback = of_tenant or journal_in(view.settings.journal) or JournalMode.NONE
    # Only the router knows the target of a client's profile, so any model may be meant.
    models = view.models.values() if name == AUTO_MODEL else models_behind(view, name)
    return max((model.journal or fallback for model in models), default=fallback)


class JournalPolicy:
    """Decides whether each request is journaled, by the newest view of the mesh."""

    def __init__(self, fleet: FleetSource, rules: JournalRules | None = None, *, is_possible: bool = True) -> None:
        """`is_possible`: whether requests can become tasks here."""
        self._fleet = fleet
        self._rules = rules or JournalRules()
        self._is_possible = is_possible
        self._view: FleetView | None = None
        self._has_modes = False
        """Whether any model of that view has its own mode; if not, no request needs a lookup of its models."""

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
        """Returns what happens to a request whose caller leaves, if it must be journaled; None: it need not be.

        Raises UNSUPPORTED_OPERATION if it must be but cannot.
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
