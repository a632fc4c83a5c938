"""A streamed chat with weft's own gRPC client: python examples/grpc_chat.py [gRPC target]."""

import sys

from weft.client import connect

with connect(sys.argv[1] if len(sys.argv) > 1 else None) as mesh:
    for event in mesh.chat("smollm2-135m", "Why is the sky blue?", max_tokens=64, timeout=60):
        print(event.delta.text, end="", flush=True)
print()
