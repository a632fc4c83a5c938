"""Runtime llama_cpp_python: the library in a child process of its own."""
