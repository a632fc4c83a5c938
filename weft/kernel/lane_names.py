"""Names on the wire of the Envoy lane: methods, headers, metadata and ports that proxy, picker and runners agree on.

The messages of the methods are those of `weft.api.envoy.v1`, which have Envoy's field numbers. weft's own packages of
protos cannot hold services of Envoy's names, so both methods are served by generic handlers.
"""

from typing import Final

EXTERNAL_PROCESSOR: Final = "envoy.service.ext_proc.v3.ExternalProcessor"
PROCESS_METHOD: Final = f"/{EXTERNAL_PROCESSOR}/Process"
"""Bidirectional: a stream of ProcessingRequest, answered by a stream of ProcessingResponse."""
ACCESS_LOG_SERVICE: Final = "envoy.service.accesslog.v3.AccessLogService"
STREAM_ACCESS_LOGS_METHOD: Final = f"/{ACCESS_LOG_SERVICE}/StreamAccessLogs"
"""A stream of StreamAccessLogsMessage, answered by one StreamAccessLogsResponse at its end."""

DESTINATION: Final = "x-gateway-destination-endpoint"
"""Header, and key in the metadata of `DESTINATION_NAMESPACE`: `ip:port`, or several in order, separated by commas."""
GATEWAYS: Final = "gateways"
"""The destination that stands for all gateways in weft's own configuration of Envoy, in place of an address."""
DESTINATION_NAMESPACE: Final = "envoy.lb"
DESTINATION_SERVED: Final = "x-gateway-destination-endpoint-served"
"""Key in the metadata of `DESTINATION_NAMESPACE`: the endpoint that the proxy chose in the end."""
SUBSET: Final = "x-gateway-destination-endpoint-subset"
"""Key in the metadata of `SUBSET_NAMESPACE`: the endpoints to choose from, as a list or separated by commas."""
SUBSET_NAMESPACE: Final = "envoy.lb.subset_hint"
TICKET_HEADER: Final = "x-weft-ticket"
"""`<base64url(claims)>.<base64url(mac)>`, one for each endpoint of `DESTINATION`, in their order, by commas."""
REASON_HEADER: Final = "x-weft-reason"
"""The reason of an error, by its name in common/v1/error_reason.proto."""
TRY_NEXT_HEADER: Final = "x-weft-try-next"
"""In a runner's answer: it has sent no content, and the next endpoint of `DESTINATION` may do better."""
ANSWER_NAMESPACE: Final = "weft.answer"
"""Namespace of metadata whose keys are headers that weft's own Envoy adds to the answer."""
PLACED: Final = "x-weft-placed"
"""Key in the metadata of `DESTINATION_NAMESPACE`: model and runner of a request, which the log repeats."""
REQUEST_ID_HEADER: Final = "x-request-id"

MAX_FALLBACKS: Final = 7
"""Endpoints after the first one in a list: with its own, as many tickets as a runner reads."""
INFERENCE_EXTENSION: Final = "inference-extension"
"""The name by which the manifests of the Gateway API Inference Extension ask for a picker's health."""
PICKER_PORT: Final = 9002
PICKER_HEALTH_PORT: Final = 9003
