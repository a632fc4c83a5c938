"""The `weft` command. One module per command; `output` prints, `options` holds what commands share."""

import os

# Children are started by exec at once, so gRPC has nothing to do in a fork; left on, it prints a warning per child.
os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")
