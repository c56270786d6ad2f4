"""What a run will need and how fast it will go, before it starts: sizes, speeds, memory, and what binds."""
