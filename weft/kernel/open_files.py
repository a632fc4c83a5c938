"""The share of a process's open files that the connections of a listener may use."""


def max_connections() -> int | None:
    """Returns half of the process's open-file limit; None: it has no limit.

    The other half is for channels, logs and databases. When files run out, accepting fails for every caller.
    """
    import resource  # noqa: PLC0415 - Windows lacks it, where the configuration can still be checked

    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return None if soft == resource.RLIM_INFINITY else max(1, soft // 2)
