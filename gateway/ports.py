"""Services and stores that one gateway calls."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from gateway.admin.admin_operations import AdminPorts
from gateway.admin.join_tokens import JoinCommands
from gateway.auth.authentication import KeyRingSource
from gateway.media import MediaSource
from gateway.registry_client import RegistryClient, RegistryService
from gateway.server_tools.permission import RemoteRules
from gateway.server_tools.tool import ToolCalls
from gateway.watch.source import WatchSource
from weft.dispatch.call import RequestDispatcher
from weft.dispatch.end_reporter import EndReporter
from weft.dispatch.fleet import FleetSource
from weft.dispatch.quoter import Quoter
from weft.dispatch.remote_router import RouterSource
from weft.dispatch.token_counts import PromptCounts
from weft.durable.batches import BatchClient, FileClient
from weft.durable.journal_policy import JournalPolicy
from weft.durable.requests import RequestClient
from weft.durable.responses import ResponseClient
from weft.durable.tasks import TaskClient
from weft.durable.usage import UsageClient
from weft.extension import Extension
from weft.kernel.services.health import HealthSource
from weft.kernel.telemetry.tracing import NO_TRACING, Tracing


def _no_command(_token: str) -> None:
    """Returns no command."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GatewayPorts:
    """Services and stores that one gateway calls."""

    dispatcher: RequestDispatcher
    fleet: FleetSource
    registry: RegistryClient
    admin: AdminPorts | None = None
    """None: there are no admin endpoints."""
    keys: KeyRingSource | None = None
    """The valid API keys; None: callers need none."""
    api_keys: RegistryService | None = None
    """Creates and revokes keys; None: no endpoints for it."""
    join_tokens: RegistryService | None = None
    """Stores the tokens with which runners join; None: no endpoints for it."""
    join_command: JoinCommands = _no_command
    """Returns the command with which a runner joins."""
    secrets: RegistryService | None = None
    """Stores secrets; None: no endpoints for it."""
    captures: RegistryService | None = None
    """Stores captured prompts and answers; None: no endpoint for it."""
    trials: RegistryService | None = None
    """Stores verdicts about pairs of trials; None: no endpoints for them."""
    responses: ResponseClient | None = None
    """Stores responses; None: they are not stored."""
    usage: UsageClient | None = None
    """Usage of tenants, keys and models; None: no endpoints for it."""
    prompt_counts: PromptCounts = field(default_factory=PromptCounts)
    """What the dispatcher has learned about the lengths of prompts."""
    quotes: Quoter | None = None
    """Estimates requests; None: no endpoint for it."""
    tasks: TaskClient | None = None
    """Runs durable tasks; None: there are none."""
    files: FileClient | None = None
    """Stores files; None: there are no files or batches."""
    result_key: bytes | None = None
    """Signs the URLs of results and seals summaries; None: there are none."""
    batches: BatchClient | None = None
    """Stores batches; None: there are none."""
    requests: RequestClient | None = None
    """Request records; None: there are none."""
    router: RouterSource | None = None
    """Whether a router is reachable; None: it runs in this process."""
    journal: JournalPolicy | None = None
    """Which requests a setting makes durable tasks; None: those that the mesh's settings and models name."""
    media: MediaSource | None = None
    """Fetches media by URL; None: as the configuration allows."""
    watched: Sequence[WatchSource] = ()
    """The kinds that `/api/v1/watch` can stream."""
    tracing: Tracing = NO_TRACING
    """Receives the spans of requests."""
    health: HealthSource = HealthSource()  # noqa: RUF009 - it has no state
    """The health of this process."""
    extensions: Sequence[Extension] = ()
    """Whose APIs are served, and whose tools the gateway runs."""
    off_paths: Mapping[str, str] = field(default_factory=dict)
    """Why paths of extensions that are off are not served, by path."""
    remote_rules: RemoteRules = RemoteRules()  # noqa: RUF009 - it is immutable
    """Whose requests may leave the mesh, by weft.yaml."""
    tool_calls: ToolCalls | None = None
    """Calls a tool of an MCP server; None: there are none."""
    ends: EndReporter | None = None
    """Reports the ends of requests that lost their router or needed none, which are counted; None: reports none."""
