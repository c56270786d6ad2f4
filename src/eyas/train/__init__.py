"""Training: batches, optimiser, loop, and what a run says while it goes."""
