"""Journaling rules from the configuration; see `weft.durable.journal_policy`."""

from router_svc.router_settings import RouterSettings
from weft.durable.journal_policy import JournalRules
from weft.kernel.requests.request_values import journal_mode_of


def journal_rules(section: RouterSettings) -> JournalRules:
    """Returns the default mode and those of configured tenants."""
    return JournalRules(
        default_tenant=journal_mode_of(section.default_tenant.journal),
        # A configured tenant inherits nothing from the default: its settings replace it, as its limits do.
        tenants={name: journal_mode_of(tenant.journal) for name, tenant in section.tenants.items()},
    )
