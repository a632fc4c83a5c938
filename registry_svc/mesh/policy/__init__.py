"""Pure decisions about sessions, names, declarations and liveness, from values and `now`."""
