"""``stepwrap report``, ``serve`` and ``compare``, and the hook that records what they show.

The commands read run folders as JSON and YAML and import no torch; ``run_info`` is a hook, and may
import ``loops``. Start reading in run_files.py, which reads a run folder; page.py puts it into the
page that page.html, page.css and page.js describe.
"""
