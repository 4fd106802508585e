"""Tools of environments: functions that a model calls, and a jail for code."""
