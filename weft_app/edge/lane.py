"""The lane: model calls that Envoy carries to the runner that the picker names, past the gateway.

Envoy asks the picker with the whole request (ext_proc, request FULL_DUPLEX_STREAMED, response NONE), and sends the
request to the endpoint that it names; where it names several, to the next ones while no byte of an answer has come.
The log of requests goes to the picker: the second witness of how each ended.
"""

from collections.abc import Iterable
from pathlib import Path

from gateway.rate_limit_headers import RATE_LIMIT_HEADERS
from weft.kernel.lane_names import (
    ANSWER_NAMESPACE,
    DESTINATION,
    DESTINATION_NAMESPACE,
    DESTINATION_SERVED,
    GATEWAYS,
    REASON_HEADER,
    REQUEST_ID_HEADER,
    SUBSET,
    TRY_NEXT_HEADER,
)
from weft_app.edge.fragments import (
    Document,
    duration,
    extension,
    file_source,
    http_options,
    load_assignment,
    message,
    static_cluster,
)
from weft_app.edge.local_replies import NO_PICKER_NAME
from weft_app.edge.plan import EdgeLimits, EdgePlan, Endpoint, LanePlan

LANE, NAMED, PICKER = "lane", "named", "picker"
"""Names of clusters: several endpoints in order, the one endpoint that is named, the picker."""
LANE_PATHS = ("/v1/chat/completions", "/v1/completions", "/v1/embeddings")
"""The calls that the picker places; all others go to a gateway."""
OWN_HEADERS = "x-weft-"
PICKER_SLACK_SECONDS = 5.0
"""How long after the deadline of every request Envoy still waits for the picker's answer, which then is an error."""
LOG_RETRIES, LOG_RETRY_SECONDS, MAX_LOG_RETRY_SECONDS = 60, 0.25, 2.0
"""How often Envoy tries to open the stream of its log again, and the pauses before: some two minutes in all, for which
runners repeat their reports, too."""
MAX_LANE_ENDPOINTS = 8
"""Attempts at most, whatever the picker asks for."""
_EXT_PROC, _USAGE = "envoy.filters.http.ext_proc", "envoy.filters.http.ai_protocol_manager"


def lane_routes(limits: EdgeLimits, to_gateways: Document) -> list[Document]:
    """Returns the routes of the lane. A request is matched again once the picker has named its endpoints.

    Pages of other origins go to a gateway, which knows what they may do.
    """
    gateways = {"name": DESTINATION, "string_match": {"exact": GATEWAYS}}
    several = {"name": DESTINATION, "string_match": {"contains": ","}}
    named = {"name": DESTINATION, "present_match": True}
    asked: list[Document] = [
        {"name": ":method", "string_match": {"exact": "POST"}},
        {"name": "origin", "present_match": True, "invert_match": True},
    ]
    retries = {"retry_policy": _retry_policy()}
    return [
        {**to_gateways, "match": {"prefix": "/", "headers": [gateways]}},
        _placed(LANE, several, limits, retries),
        _placed(NAMED, named, limits, {}),
        *({**to_gateways, "match": {"path": path, "headers": asked}} for path in LANE_PATHS),
    ]


def _placed(cluster: str, header: Document, limits: EdgeLimits, more: Document) -> Document:
    return {
        "match": {"prefix": "/", "headers": [header]},
        # The picker says how long an answer may take (x-envoy-upstream-rq-timeout-ms).
        "route": {"cluster": cluster, "timeout": "0s", "idle_timeout": "0s", **more},
        "response_headers_to_add": _answer_headers(),
        "response_headers_to_remove": [TRY_NEXT_HEADER],
        # A request is sent again from memory: any body that the mesh takes fits.
        "request_body_buffer_limit": limits.max_body_bytes,
    }


def _answer_headers() -> list[Document]:
    """Returns the headers that Envoy adds to every answer: the id of its request, and the rate limits of its caller."""
    limits = {name: f"%DYNAMIC_METADATA({ANSWER_NAMESPACE}:{name})%" for name in RATE_LIMIT_HEADERS}
    return [
        # What is not known is left out.
        {"header": {"key": name, "value": value}, "append_action": "OVERWRITE_IF_EXISTS_OR_ADD"}
        for name, value in {REQUEST_ID_HEADER: f"%REQ({REQUEST_ID_HEADER})%", **limits}.items()
    ]


def _retry_policy() -> Document:
    previous = "extensions.retry.host.previous_hosts.v3.PreviousHostsPredicate"
    return {
        # A runner sends its first byte with the first content: one that is reset before has sent nothing to the caller.
        # With that header an answer comes from a runner that has sent no content, and another one may do better.
        "retry_on": "connect-failure,refused-stream,reset,retriable-headers",
        "retriable_headers": [{"name": TRY_NEXT_HEADER, "present_match": True}],
        # The picker allows one attempt for each further endpoint that it names (x-envoy-max-retries).
        "num_retries": 0,
        "retry_host_predicate": [extension("envoy.retry_host_predicates.previous_hosts", previous)],
        "host_selection_retry_max_attempts": MAX_LANE_ENDPOINTS,
        "retry_back_off": {"base_interval": "0.001s", "max_interval": "0.010s"},
    }


def not_in_lane() -> Document:
    """Returns what a route to a gateway has besides: neither the picker nor the reader of usage sees its requests."""
    off = message("config.route.v3.FilterConfig", disabled=True)
    return {"typed_per_filter_config": {_EXT_PROC: off, _USAGE: off}}


def own_headers_removed() -> list[Document]:
    """Returns what takes the mesh's own headers out of the requests of callers, before anything reads them."""
    by_prefix = {"remove_on_match": {"key_matcher": {"prefix": OWN_HEADERS}}}
    mutations: list[Document] = [by_prefix, *({"remove": name} for name in (DESTINATION, DESTINATION_SERVED, SUBSET))]
    kind = "extensions.http.early_header_mutation.header_mutation.v3.HeaderMutation"
    return [extension("envoy.http.early_header_mutation.header_mutation", kind, mutations=mutations)]


def lane_filters(limits: EdgeLimits) -> list[Document]:
    """Returns the filters that ask the picker, and that read the usage of answers."""
    picker = extension(
        _EXT_PROC,
        "extensions.filters.http.ext_proc.v3.ExternalProcessor",
        grpc_service=_to_picker(),
        processing_mode={
            "request_header_mode": "SEND",
            "request_body_mode": "FULL_DUPLEX_STREAMED",
            "request_trailer_mode": "SEND",
            "response_header_mode": "SKIP",
            "response_body_mode": "NONE",
            "response_trailer_mode": "SKIP",
        },
        # The picker answers when the scheduler does, within the deadline of every request.
        message_timeout=duration(limits.request_timeout_seconds + PICKER_SLACK_SECONDS),
        failure_mode_allow=False,
        # For the caller it becomes a 503 in the envelope of the mesh.
        status_on_error={"code": NO_PICKER_NAME},
        # It says how often a request may be sent again.
        mutation_rules={"allow_envoy": True},
        route_cache_action="CLEAR",
        metadata_options={"receiving_namespaces": {"untyped": [DESTINATION_NAMESPACE, ANSWER_NAMESPACE]}},
    )
    reading = {"include_unconfigured_routes": True, "default_llm_protocol": "OPENAI_CHAT_COMPLETIONS"}
    kind = "extensions.filters.http.ai_protocol_manager.v3.AiProtocolManager"
    return [picker, extension(_USAGE, kind, response_handling={"token_usage": reading})]


def lane_log(limits: EdgeLimits) -> list[Document]:
    """Returns the log of requests, to the picker: those alone that it has placed."""
    placed = {"name": DESTINATION, "present_match": True}
    log = extension(
        "envoy.access_loggers.http_grpc",
        "extensions.access_loggers.grpc.v3.HttpGrpcAccessLogConfig",
        common_config={
            "log_name": "weft-lane",
            "transport_api_version": "V3",
            "grpc_service": _to_picker(),
            "buffer_flush_interval": duration(limits.log_flush_seconds),
            # What is logged while no picker listens is kept and sent again, up to 64 KiB: that is six entries, because
            # the first message of a stream has 60 KB of Envoy's description of itself.
            "grpc_stream_retry_policy": {
                "num_retries": LOG_RETRIES,
                "retry_back_off": {
                    "base_interval": duration(LOG_RETRY_SECONDS),
                    "max_interval": duration(MAX_LOG_RETRY_SECONDS),
                },
            },
        },
        additional_request_headers_to_log=[DESTINATION],
        additional_response_headers_to_log=[REASON_HEADER],
    )
    return [{**log, "filter": {"header_filter": {"header": placed}}}]


def lane_clusters(plan: EdgePlan, lane: LanePlan) -> list[Document]:
    """Returns the clusters of the runners and of the picker."""
    limits = plan.limits
    thresholds = {name: getattr(limits, name) for name in ("max_pending_requests", "max_requests", "max_retries")}
    source = {"metadata": {"key": DESTINATION_NAMESPACE, "path": [{"key": DESTINATION}]}}
    policy = extension(
        "envoy.load_balancing_policies.override_host",
        "extensions.load_balancing_policies.override_host.v3.OverrideHost",
        override_host_sources=[source, {"header": DESTINATION}],
        selected_host_key={"key": DESTINATION_NAMESPACE, "path": [{"key": DESTINATION_SERVED}]},
        # None of the endpoints that the picker names is known: none other has a ticket for the request.
        fallback_policy={"policies": [{"typed_extension_config": _no_other()}]},
    )
    runners: Document = {
        "name": LANE,
        "connect_timeout": duration(limits.connect_timeout_seconds),
        "per_connection_buffer_limit_bytes": limits.buffer_bytes,
        "circuit_breakers": {"thresholds": [{"max_connections": limits.max_requests, **thresholds}]},
        "load_balancing_policy": {"policies": [{"typed_extension_config": policy}]},
        "typed_extension_protocol_options": _http_of_runners(limits),
    }
    if lane.endpoints_file is None:
        runners |= static_cluster(LANE, lane.endpoints)
    else:
        runners |= {"type": "EDS", "eds_cluster_config": {"eds_config": file_source(str(lane.endpoints_file))}}
    return [runners, _named_cluster(limits), _picker_cluster(lane.picker, limits)]


def _named_cluster(limits: EdgeLimits) -> Document:
    """Returns the cluster of the endpoint that the picker names, whatever it is: callers cannot send its header."""
    thresholds = {name: getattr(limits, name) for name in ("max_pending_requests", "max_requests")}
    return {
        "name": NAMED,
        "type": "ORIGINAL_DST",
        "lb_policy": "CLUSTER_PROVIDED",
        "original_dst_lb_config": {"use_http_header": True, "http_header_name": DESTINATION},
        "connect_timeout": duration(limits.connect_timeout_seconds),
        "per_connection_buffer_limit_bytes": limits.buffer_bytes,
        "circuit_breakers": {"thresholds": [{"max_connections": limits.max_requests, **thresholds}]},
        "typed_extension_protocol_options": _http_of_runners(limits),
    }


def _http_of_runners(limits: EdgeLimits) -> Document:
    return http_options(
        common_http_protocol_options={"idle_timeout": duration(limits.idle_seconds / 2)},
        explicit_http_config={"http_protocol_options": {}},
    )


def endpoints_document(runners: Iterable[Endpoint]) -> Document:
    """Returns the content of the file of endpoints: the HTTP ports of runners, in a steady order."""
    known = sorted(set(runners), key=str)
    return {"resources": [message("config.endpoint.v3.ClusterLoadAssignment", **load_assignment(LANE, known))]}


def _no_other() -> Document:
    """Returns a policy that finds no host: the subset of those with a key that none has."""
    robin = extension(
        "envoy.load_balancing_policies.round_robin", "extensions.load_balancing_policies.round_robin.v3.RoundRobin"
    )
    return extension(
        "envoy.load_balancing_policies.subset",
        "extensions.load_balancing_policies.subset.v3.Subset",
        fallback_policy="NO_FALLBACK",
        subset_selectors=[{"keys": ["none"]}],
        subset_lb_policy={"policies": [{"typed_extension_config": robin}]},
    )


def _picker_cluster(picker: Endpoint | Path, limits: EdgeLimits) -> Document:
    if isinstance(picker, Path):
        pipe = {"endpoint": {"address": {"pipe": {"path": str(picker)}}}}
        where: Document = {
            "type": "STATIC",
            "load_assignment": {"cluster_name": PICKER, "endpoints": [{"lb_endpoints": [pipe]}]},
        }
    else:
        where = static_cluster(PICKER, (picker,))
    return {
        "name": PICKER,
        **where,
        "connect_timeout": duration(limits.connect_timeout_seconds),
        "circuit_breakers": {
            "thresholds": [{"max_requests": limits.max_requests, "max_pending_requests": limits.max_requests}]
        },
        "typed_extension_protocol_options": http_options(explicit_http_config={"http2_protocol_options": {}}),
    }


def _to_picker() -> Document:
    return {"envoy_grpc": {"cluster_name": PICKER}}
