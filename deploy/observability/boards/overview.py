"""The board Overview: how well callers are served, by service levels, requests, times and tokens."""

from boards.board import RATE, Board, Bounds, Panel, Query, Section, Unit, View, quantile, rate_by, share_within

REQUEST_TIMES = "gen_ai_server_request_duration_seconds"
FIRST_CONTENT_TIMES = "gen_ai_server_time_to_first_token_seconds"
PACES = "gen_ai_server_time_per_output_token_seconds"
TOKENS = "gen_ai_client_token_usage_tokens"
OF_MODEL = 'gen_ai_request_model=~"$model"'
FIRST_CONTENT_GOAL = "2.5"
PACE_GOAL = "0.1"
GOAL = Bounds(warning=0.99, critical=0.95, is_falling=True)

_ENDS = f'sum(rate(weft_router_requests_total{{model=~"$model"}}[{RATE}]))'
_GOOD = f'sum(rate(weft_router_requests_total{{model=~"$model", outcome=~"completed|cancelled"}}[{RATE}]))'

_LEVELS = Section(
    "Service levels",
    (
        Panel(
            title="Answered",
            about="Share of requests that were answered, or cancelled by their callers. The rest: board Truth.",
            unit=Unit.SHARE,
            view=View.TILE,
            width=6,
            bounds=GOAL,
            queries=(Query(f"{_GOOD} / {_ENDS}"),),
        ),
        Panel(
            title=f"First token within {FIRST_CONTENT_GOAL} s",
            about="Share of streams whose first content came in time. Waits and loads by reason: board Scheduler.",
            unit=Unit.SHARE,
            view=View.TILE,
            width=6,
            bounds=GOAL,
            queries=(Query(share_within(FIRST_CONTENT_TIMES, FIRST_CONTENT_GOAL, OF_MODEL)),),
        ),
        Panel(
            title=f"Within {PACE_GOAL} s per token",
            about="Share of answers whose tokens came at this pace or faster. Engines at their limit: board Runners.",
            unit=Unit.SHARE,
            view=View.TILE,
            width=6,
            bounds=GOAL,
            queries=(Query(share_within(PACES, PACE_GOAL, OF_MODEL)),),
        ),
        Panel(
            title="Requests",
            about="Requests that ended, per second.",
            unit=Unit.PER_SECOND,
            view=View.TILE,
            width=6,
            queries=(Query(_ENDS),),
        ),
    ),
)

_TRAFFIC = Section(
    "Traffic",
    (
        Panel(
            title="Requests by model",
            about="Requests that ended, by the model asked for.",
            unit=Unit.PER_SECOND,
            view=View.AREAS,
            queries=(Query(rate_by("weft_router_requests_total", "model"), "{{model}}"),),
        ),
        Panel(
            title="Requests by outcome",
            about="Completed, failed, refused, cancelled.",
            unit=Unit.PER_SECOND,
            view=View.AREAS,
            queries=(Query(rate_by("weft_router_requests_total", "outcome"), "{{outcome}}"),),
        ),
        Panel(
            title="Tokens by type",
            about="Tokens of prompts and answers.",
            unit=Unit.NUMBER,
            view=View.AREAS,
            queries=(
                Query(
                    f"sum by (gen_ai_token_type) (rate({TOKENS}_sum{{{OF_MODEL}}}[{RATE}]))", "{{gen_ai_token_type}}"
                ),
            ),
        ),
        Panel(
            title="Requests over HTTP by surface and code",
            about="As the gateway answered them.",
            unit=Unit.PER_SECOND,
            view=View.AREAS,
            width=12,
            queries=(Query(rate_by("weft_gateway_requests_total", "surface", "code"), "{{surface}} {{code}}"),),
        ),
        Panel(
            title="Open streams",
            about="Streams that are being answered over HTTP.",
            unit=Unit.NUMBER,
            width=12,
            queries=(Query("sum(weft_gateway_active_streams)", "streams"),),
        ),
    ),
)

_TIMES = Section(
    "Times",
    (
        Panel(
            title="Time to the first token",
            about="From the arrival of a request to its first content.",
            unit=Unit.SECONDS,
            queries=tuple(
                Query(quantile(share, FIRST_CONTENT_TIMES, where=OF_MODEL), name)
                for share, name in ((0.5, "p50"), (0.95, "p95"), (0.99, "p99"))
            ),
        ),
        Panel(
            title="Time per token",
            about="Between tokens of an answer, after the first.",
            unit=Unit.SECONDS,
            queries=tuple(
                Query(quantile(share, PACES, where=OF_MODEL), name)
                for share, name in ((0.5, "p50"), (0.95, "p95"), (0.99, "p99"))
            ),
        ),
        Panel(
            title="Time of a request",
            about="From the arrival of a request to its end.",
            unit=Unit.SECONDS,
            queries=tuple(
                Query(quantile(share, REQUEST_TIMES, where=OF_MODEL), name)
                for share, name in ((0.5, "p50"), (0.95, "p95"), (0.99, "p99"))
            ),
        ),
    ),
)

OVERVIEW = Board(
    uid="weft-overview",
    title="weft / Overview",
    about="How well callers are served.",
    sections=(_LEVELS, _TRAFFIC, _TIMES),
)
