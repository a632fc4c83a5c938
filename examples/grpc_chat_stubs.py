"""The same with the generated stubs alone, as a client in any language would: deadline, metadata, cancel, receipt.

python examples/grpc_chat_stubs.py <gRPC target>
"""

import sys

import grpc

from weft.api.common.v1 import chat_pb2
from weft.api.router.v1 import inference_service_pb2, inference_service_pb2_grpc

request = inference_service_pb2.ChatRequest(model="smollm2-135m")
request.payload.messages.add(role=chat_pb2.ROLE_USER).content.add(text="Why is the sky blue?")
request.payload.sampling.max_tokens = 64

with grpc.insecure_channel(sys.argv[1]) as channel:
    stub = inference_service_pb2_grpc.InferenceServiceStub(channel)
    call = stub.Chat(request, timeout=60, metadata=(("x-request-id", "example-1"),))
    for response in call:
        for event in response.events:
            if event.HasField("delta"):
                print(event.delta.text, end="", flush=True)
            elif event.HasField("finished"):
                print(f"\n\n{event.finished.receipt}")
