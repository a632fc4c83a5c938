"""The limit of a process's open files, and the share of it that the connections of a listener may use."""

MAX_RAISED = 10_240
"""The most that macOS accepts where its hard limit is infinite, and more than twice the default of
`connections.max_connections`."""


def raise_open_files() -> None:
    """Raises this process's limit to its hard limit, at most to MAX_RAISED.

    The usual soft limits, 1,024 on Linux and 256 on macOS, are for programs that call select().
    """
    import resource  # noqa: PLC0415 - as below

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = MAX_RAISED if hard == resource.RLIM_INFINITY else min(hard, MAX_RAISED)
    if soft != resource.RLIM_INFINITY and soft < most:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))


def max_connections() -> int | None:
    """Returns half of the process's open-file limit; None: it has no limit.

    The other half is for channels, logs and databases. When files run out, accepting fails for every caller.
    """
    import resource  # noqa: PLC0415 - Windows lacks it, where the configuration can still be checked

    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return None if soft == resource.RLIM_INFINITY else max(1, soft // 2)
