"""The registry's decisions, pure: values and `now` in, decisions out."""
