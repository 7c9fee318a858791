"""One file a verb of the user: what a command does, without its command line."""
