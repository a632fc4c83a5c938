"""The `weft` command. One module per command; `output` prints, `options` holds what commands share."""

import os

# Before anything imports grpc. Children are started by exec at once, so gRPC has nothing to do in a fork; left on, it
# prints a warning per child. Its newer event engine costs a fifth more CPU per message: weft_app/DESIGN.md.
os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")
os.environ.setdefault("GRPC_EXPERIMENTS", "-event_engine_client,-event_engine_listener")
