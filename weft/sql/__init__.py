"""What stores on SQL share."""
