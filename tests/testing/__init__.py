"""Tests of the virtual device, each against the device itself."""
