"""What one step of decode admission costs the scheduler, beside stock's (``README.md``)."""
