"""Writers of the files that runtimes load: one module a backend, listed in `table.BACKENDS`."""
