"""Capturing, staging and restoring the training state. Only ``courier``, ``wire`` and ``request`` run without torch."""
