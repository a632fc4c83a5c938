"""Runtime vllm: vLLM's server, `vllm serve`."""
