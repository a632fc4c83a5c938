"""The runner's pure decisions: values and `now` in, decisions out."""
