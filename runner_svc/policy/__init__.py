"""Pure decisions of the runner: values and `now` in, decisions out."""
