"""Pure decisions of the router: values and `now` in, decisions out. One small file per policy."""
