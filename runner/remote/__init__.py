"""Remote run folders, checkpoints and files: URLs that fsspec opens, such as ``s3://bucket/run``.

A run with such a folder trains in a working folder on this machine, whose files are uploaded.
Readers use copies in the cache. May import the loops, and of the runner `rank_processes`; the
runner imports these modules when it has a URL, and nothing outside of them imports fsspec. Start
with `runs.py`, the remote folder of a run that trains; `copies.py` is for readers.
"""
