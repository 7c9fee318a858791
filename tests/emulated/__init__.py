"""Tests on a whole emulated arm64 machine: slow, and run by name, `scripts/test -m machine`."""
