"""Our wrappers inside Lightning: importing this room registers `Trainer(strategy="stepwrap")`. Only
here Lightning is imported. Start with strategy.py.
"""
