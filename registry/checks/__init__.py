"""Is every name, key and value of a run config right? All mistakes at once, before anything is
built. Start with check_config.py.
"""
