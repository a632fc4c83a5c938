"""Runtime server: any OpenAI-compatible server program, started and supervised by weft."""
