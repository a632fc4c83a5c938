"""One model on one backend: admission, loading, the lifecycle loop, idle time, restarts and the watchdog."""
