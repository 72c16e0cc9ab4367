"""``stepwrap report``, ``serve`` and ``compare``.

They read the files that hooks and loggers write into run folders, as JSON and YAML, and import no
torch; only ``registry`` and ``runner`` may be imported. Start reading in run_files.py, which reads
a run folder. page.py puts the runs into the page that page.html, page.css and page.js describe.
"""
