"""Several processes, files written whole, checkpoints of long jobs."""
