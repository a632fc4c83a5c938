"""Wake plans as `registry.v1.Wake` messages in their canonical form, and what they say. Never changed once made.

URLs, headers and arguments may hold credentials, so that a plan is never printed.
"""

from weft.api.registry.v1 import wake_pb2
from weft.wake.recipes import DEFAULT_BROADCAST_ADDRESS, DEFAULT_MAX_WAIT_SECONDS, DEFAULT_METHOD, DEFAULT_WAKE_PORT


def set_defaults(plan: wake_pb2.Wake) -> None:
    """Set what a new plan leaves open to its default, so that equal plans are equal messages."""
    plan.max_wait.FromNanoseconds(round((max_wait_seconds(plan) or DEFAULT_MAX_WAIT_SECONDS) * 1e9))
    if plan.by_mesh.HasField("http"):
        plan.by_mesh.http.method = plan.by_mesh.http.method or DEFAULT_METHOD
    elif plan.by_mesh.HasField("wake_on_lan"):
        packet = plan.by_mesh.wake_on_lan
        packet.broadcast_address = packet.broadcast_address or DEFAULT_BROADCAST_ADDRESS
        packet.port = packet.port or DEFAULT_WAKE_PORT


def max_wait_seconds(plan: wake_pb2.Wake) -> float:
    """Return the maximum wait from the first step until the model admits requests."""
    return plan.max_wait.ToNanoseconds() / 1e9
