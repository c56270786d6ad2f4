"""States on disk: a store of eyas, or another tool's files read in place, behind one `Source`."""
