"""The two ends of slots in processes of their own, to be killed and frozen.

`slot_processes.py runner ADDRESS` holds a slot for each call. `slot_processes.py picker ADDRESS TICKET...` takes one
with each ticket: claims and code in hexadecimal digits, with a colon between them. Both say when they do.
"""

import asyncio
import sys
from typing import Any

from gateway.picker.engine_slot import EngineSlots
from weft.api.runner.v1 import ticket_pb2
from weft.dispatch.engine_slots import HOLD_SLOT
from weft.dispatch.placement import Grant
from weft.kernel.rpc import ChannelPool, add_methods, new_server
from weft.link.carried_calls import CarriedCalls

READY = "ready"
URL = "http://127.0.0.1:1"


def slot_grant(address: str, claims: bytes = b"", mac: bytes = b"") -> Grant:
    """A grant of a slot at a runner."""
    found = ticket_pb2.TicketClaims.FromString(claims)
    return Grant(
        claims=claims,
        mac=mac,
        runner=found.runner,
        runner_incarnation=found.runner_incarnation,
        address=address,
        host="h",
        model=found.model,
        attempt=1,
    )


async def hold(_: Any, context: Any) -> None:
    """Hold a slot until its call ends."""
    await context.write(HOLD_SLOT.response(url=URL))
    await asyncio.Event().wait()


def _say_ready() -> None:
    sys.stdout.write(f"{READY}\n")
    sys.stdout.flush()


async def _runner(address: str) -> None:
    server, carried = new_server(), CarriedCalls()
    add_methods(server, {HOLD_SLOT: hold})
    carried.serve(HOLD_SLOT, hold)
    carried.add_to_server(server)
    server.add_insecure_port(address)
    await server.start()
    _say_ready()
    await server.wait_for_termination()


async def _picker(address: str, *tickets: str) -> None:
    slots, held = EngineSlots(ChannelPool()), []
    for ticket in tickets:
        claims, _, mac = ticket.partition(":")
        held.append(await slots.hold(slot_grant(address, bytes.fromhex(claims), bytes.fromhex(mac))))
    _say_ready()
    await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run({"runner": _runner, "picker": _picker}[sys.argv[1]](*sys.argv[2:]))
