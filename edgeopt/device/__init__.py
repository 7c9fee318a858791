"""Facts and figures of a device: the runner's host side, what it measured, and the judging of it."""
