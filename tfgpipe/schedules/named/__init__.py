"""The named schedules, one policy a module."""
