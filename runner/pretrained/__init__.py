"""Load the weights that a new training starts from: read files, match names, add adapters.

Imports ``run_folder``, ``failure`` and the layers below the runner. Start with load.py.
"""
