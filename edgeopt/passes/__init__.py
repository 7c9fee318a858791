"""Graph passes over an ExportedGraph: an ordered table, each pass verified against the program before it."""

from edgeopt.passes.run import PassRecord, optimize, reoptimize

__all__ = ["PassRecord", "optimize", "reoptimize"]
