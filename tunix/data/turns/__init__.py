"""Where the turns of a rendered conversation begin and end."""
