"""Pure decisions about operations, governance and the audit log, from values and `now`."""
