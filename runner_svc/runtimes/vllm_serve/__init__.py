"""Runtime vllm_serve: `vllm serve` as a child process."""
