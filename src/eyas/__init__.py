"""eyas: make EAGLE-3 drafters, and see what a training run is doing."""

__version__ = "0.1.0.dev0"
