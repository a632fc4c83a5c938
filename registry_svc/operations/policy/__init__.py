"""Decisions about operations, governance and the audit log, pure: values and `now` in, decisions out."""
