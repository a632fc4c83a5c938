"""What every runner must do, as checks against a running one, whoever wrote it. `weft conformance` runs them."""
