"""The `weft` command. One module per command; `output` prints, `options` has the shared options."""

import os

# Must be set before anything imports grpc. Children are started by exec immediately, so gRPC has nothing to do in a
# fork but print a warning per child. Its newer event engine costs 20 % more CPU per message: weft_app/DESIGN.md.
os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")
os.environ.setdefault("GRPC_EXPERIMENTS", "-event_engine_client,-event_engine_listener")
