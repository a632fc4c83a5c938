"""One model on one backend: admission, loading, lifecycle loop, idle timer, restarts and watchdog."""
