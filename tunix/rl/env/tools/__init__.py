"""Tools of environments: functions that a model calls."""
