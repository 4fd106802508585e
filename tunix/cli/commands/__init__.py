"""One module per subcommand of `tunix`."""
