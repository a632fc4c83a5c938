"""What requests in flight are counted by."""

CandidateKey = tuple[str, str, str]
"""Model, runner and incarnation of a candidate; see `Candidate.key`."""
RunnerKey = tuple[str, str]
"""A runner and its incarnation."""
