"""The runner: a sidecar that serves one runtime on one host and supervises its backend processes."""
