"""An engine that is hostile: a server that answers with given bytes, and a catalogue of answers that are wrong."""
