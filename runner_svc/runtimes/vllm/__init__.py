"""Runtime vllm: vLLM as a library, in a child process."""
