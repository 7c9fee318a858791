"""The user's model becomes a Program, with reference outputs taken before anything is changed."""

from edgeopt.capture.capture import capture

__all__ = ["capture"]
