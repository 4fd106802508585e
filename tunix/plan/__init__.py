"""Plans: what the programs of a run need, before there are chips to run them."""
