"""Runtime llama_server: llama.cpp's HTTP server as a child process."""
