"""The compiled programs of a launch; `run` calls them."""
