"""torchao is imported without its noise, and without silencing anybody else."""

from __future__ import annotations

import subprocess
import sys

SCRIPT = """
import logging, sys
logging.getLogger("torchao").warning("before")
import edgeopt.quant
logging.getLogger("torchao").warning("after")
assert not logging.getLogger("torchao").filters
"""


def test_the_import_says_nothing_and_leaves_logging_as_it_was():
    done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, check=True)
    assert done.stdout == ""
    assert done.stderr.split() == ["before", "after"]
