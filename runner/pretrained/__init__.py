"""Load the weights that a new training starts from: read files, and match names to a model.

Imports ``run_folder`` and the layers below the runner. Start with load.py.
"""
