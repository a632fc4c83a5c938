"""Child processes that cannot outlive the runner, cannot block on their output, and end reliably."""
