"""Pure decisions of the router: values and `now` in, decisions out. See router_svc/DESIGN.md."""
