"""The drafter: network, attention, losses, and the checkpoint that engines load."""
