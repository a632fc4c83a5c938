"""Child processes: started so that they cannot outlive us, drained so that they cannot block, ended for certain."""
