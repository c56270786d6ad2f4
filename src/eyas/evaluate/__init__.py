"""Evaluation: figures on a validation split, and real decoding."""
