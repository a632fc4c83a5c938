"""A hostile engine: a server that answers with given bytes, and a catalogue of wrong answers."""
