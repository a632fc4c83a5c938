"""Runtime llama_cpp_python: the library in its own child process."""
