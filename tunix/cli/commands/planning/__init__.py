"""Parts of `tunix plan`: the settings that fit, and plans of servers."""
