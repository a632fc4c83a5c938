"""The board Runners and memory: accelerator memory by holder, engines and their caches."""

from boards.board import MODEL, RATE, Board, Panel, Query, Section, Unit, View, quantile, rate_by

_MEMORY = Section(
    "Accelerator memory",
    (
        Panel(
            title="Held by model",
            about="Memory that models and programs hold by lease, per host.",
            unit=Unit.BYTES,
            view=View.AREAS,
            queries=(Query("sum by (host, holder) (weft_memory_held_bytes)", "{{host}} {{holder}}"),),
        ),
        Panel(
            title="Free to lease",
            about="What a lease would get now, per host.",
            unit=Unit.BYTES,
            queries=(Query("weft_memory_free_bytes", "{{host}}"),),
        ),
        Panel(
            title="Use",
            about="Share of the memory that is not free to lease, per host.",
            unit=Unit.SHARE,
            queries=(Query("1 - weft_memory_free_bytes / (weft_memory_total_bytes > 0)", "{{host}}"),),
        ),
    ),
)

_LEDGER = Section(
    "Ledger of devices",
    (
        Panel(
            title="Reserved, seen and foreign",
            about="Memory that leases reserve, that anything uses, and that is used without a lease, by device.",
            unit=Unit.BYTES,
            queries=(
                Query(
                    'sum by (host, device, kind) (weft_ledger_device_bytes{kind=~"reserved|seen|foreign"})',
                    "{{host}} {{device}} {{kind}}",
                ),
            ),
        ),
        Panel(
            title="Leases",
            about="Leases by state, and waits for memory. Orphaned: the holder is gone, its memory not free yet.",
            unit=Unit.NUMBER,
            queries=(
                Query("sum by (host, state) (weft_leases)", "{{host}} {{state}}"),
                Query("sum by (host) (weft_waiting_leases)", "{{host}} waiting"),
            ),
        ),
        Panel(
            title="Sessions and the watch",
            about="Runners with a session, and how long the router has not heard of the registry.",
            unit=Unit.NUMBER,
            queries=(
                Query("sum by (state) (weft_sessions)", "{{state}} runners"),
                Query("max by (instance) (weft_router_watch_lag_seconds)", "{{instance}} lag in s"),
            ),
        ),
    ),
)

_WORK = Section(
    "Work",
    (
        Panel(
            title="Slots in use",
            about="Share of a model's slots that requests hold, by runner. At 1 further requests wait.",
            unit=Unit.SHARE,
            queries=(
                Query(
                    f"sum by (runner, model) (weft_runner_requests_running{{{MODEL}}})"
                    f" / (sum by (runner, model) (weft_runner_slots{{{MODEL}}}) > 0)",
                    "{{runner}} {{model}}",
                ),
            ),
        ),
        Panel(
            title="Models by phase",
            about="Ready, loading, hibernating and so on, by runner.",
            unit=Unit.NUMBER,
            view=View.AREAS,
            queries=(Query("sum by (runner, phase) (weft_runner_models)", "{{runner}} {{phase}}"),),
        ),
        Panel(
            title="Crashes and stalls",
            about="Faults of engines, by model. Their last words: weft logs MODEL.",
            unit=Unit.NUMBER,
            queries=(
                Query(f"sum by (runner, model) (increase(weft_runner_faults_total{{{MODEL}}}[{RATE}]))", "{{model}}"),
            ),
        ),
    ),
)

_CACHES = Section(
    "Caches",
    (
        Panel(
            title="Prompt tokens from the cache",
            about="Share of prompt tokens that the engine had computed before.",
            unit=Unit.SHARE,
            queries=(
                Query(
                    f"{rate_by('weft_runner_cached_prompt_tokens_total', 'runner', 'model')}"
                    f" / ({rate_by('weft_runner_prompt_tokens_total', 'runner', 'model')} > 0)",
                    "{{runner}} {{model}}",
                ),
            ),
        ),
        Panel(
            title="Use of the KV cache",
            about="Of engines that report it. Near 1 requests are preempted: shorter contexts, or fewer slots.",
            unit=Unit.SHARE,
            queries=(Query(f"weft_runner_kv_cache_share{{{MODEL}}}", "{{runner}} {{model}}"),),
        ),
        Panel(
            title="Requests in the engine",
            about="As the engine counts them: running, and waiting for its cache.",
            unit=Unit.NUMBER,
            queries=(
                Query(f"weft_runner_engine_requests_running{{{MODEL}}}", "{{runner}} {{model}} running"),
                Query(f"weft_runner_engine_requests_waiting{{{MODEL}}}", "{{runner}} {{model}} waiting"),
            ),
        ),
    ),
)

_PROCESSES = Section(
    "Processes",
    (
        Panel(
            title="Delay of the event loop, p99",
            about="How late timers are. Beyond 100 ms a service is out of processor time, or something blocks it.",
            unit=Unit.SECONDS,
            queries=(Query(quantile(0.99, "weft_event_loop_delay_seconds", "service", where=""), "{{service}}"),),
        ),
        Panel(
            title="Processor time",
            about="Processors in use, by process.",
            unit=Unit.NUMBER,
            queries=(
                Query(
                    f"sum by (instance, runner) (rate(process_cpu_seconds_total[{RATE}]))", "{{instance}} {{runner}}"
                ),
            ),
        ),
        Panel(
            title="Memory of processes",
            about="Resident memory, without engines.",
            unit=Unit.BYTES,
            queries=(Query("sum by (instance, runner) (process_resident_memory_bytes)", "{{instance}} {{runner}}"),),
        ),
    ),
)

RUNNERS = Board(
    uid="weft-runners",
    title="weft / Runners and memory",
    about="What runs where, and what it takes.",
    sections=(_MEMORY, _LEDGER, _WORK, _CACHES, _PROCESSES),
)
