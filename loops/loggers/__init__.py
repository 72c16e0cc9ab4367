"""Loggers: hooks that write records, settings and media to files, TensorBoard, wandb and MLflow.

May import the hooks of ``loops`` and everything below them. Start with ``logger.py``.
"""
