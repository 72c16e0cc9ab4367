"""``stepwrap report``, ``serve`` and ``compare``.

They read the files that hooks and loggers write into run folders, as JSON and YAML, and do not
import torch; only ``registry`` and ``runner`` may be imported. Start with run_files.py, which reads
a run folder. page.py puts the runs into the page that page.html, page.css and page.js describe.
"""
