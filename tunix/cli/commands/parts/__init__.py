"""What commands share: arguments, tables, data files, the server of the chat page."""
