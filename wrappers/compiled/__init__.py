"""A training step as one compiled program.

The forward is captured (capture.py), traced together with backward and update (trace.py), compiled
and, on CPUs, kept on disk (program.py). The result is a *program*. It runs instead of the usual
step as long as everything that it assumes is unchanged (contract.py), and some of its steps are
compared with eager steps (verifier.py, reference.py). Imports steps, batchnorm, ddp, optimizers and
one_process.py. Start with compiled_step.py.
"""
