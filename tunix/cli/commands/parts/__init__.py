"""Parts of several commands: arguments, tables, data files, the chat page's server."""
