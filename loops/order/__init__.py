"""The order of the data, and how a run cuts it into updates on any number of ranks.

Start reading in `sampler.py`; `layout.py` takes a run on from a checkpoint. May import what lies
below it in `loops`: checkpoints, schedules, the state and the random streams.
"""
