"""Trackers and other listeners, in a process of their own that follows events.jsonl.

The trainer starts `python -m eyas.record.sinks` and never speaks to it again: a tracker that hangs, leaks or dies takes
nothing with it. The same command sends the events of a finished run. Each sink is one class here:

    event(e)   take one event; may take its time
    close()    the run is over

and needs its own optional package (`pip install eyas[tensorboard]`, and so on).
"""
