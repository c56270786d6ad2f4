"""From a verifier to a store of its states."""
