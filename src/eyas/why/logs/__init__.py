"""Read the log of a training run: how far, how fast, what went wrong, and why it is silent."""
