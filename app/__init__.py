"""Lockstep, the application: commands, configuration, data, training, reports."""

__version__ = "0.1.0"
