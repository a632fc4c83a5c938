"""What the runtimes of vLLM share: settings, engine arguments, memory forecasts and load stages. No runtime itself."""
