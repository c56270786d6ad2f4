"""The fault lab: real processes in known states, and the question put to each of them."""
