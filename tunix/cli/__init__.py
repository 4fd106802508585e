"""The tunix command: YAML, argv and names stop here."""
