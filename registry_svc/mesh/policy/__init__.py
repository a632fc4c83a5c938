"""Decisions about sessions, names, declarations and liveness, pure: values and `now` in, decisions out."""
