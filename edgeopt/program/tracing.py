"""The state of torch in which models are called, traced and exported."""

from __future__ import annotations

import contextlib
import logging
import warnings
from collections.abc import Iterator

import torch


@contextlib.contextmanager
def plain_attention() -> Iterator[None]:
    """Without torch's fused inference kernel of nn.MultiheadAttention, which no exporter or other runtime knows."""
    was = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        yield
    finally:
        torch.backends.mha.set_fastpath_enabled(was)


@contextlib.contextmanager
def quiet(*loggers: str) -> Iterator[None]:
    """Without warnings, and without what these loggers say: an exception tells of a failure, and we pass that on."""
    with silenced(*loggers), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


@contextlib.contextmanager
def silenced(*loggers: str) -> Iterator[None]:
    """Without what these loggers and those below them say."""
    found = [logging.getLogger(name) for name in loggers]
    levels = [logger.level for logger in found]
    for logger in found:
        logger.setLevel(logging.CRITICAL + 1)
    try:
        yield
    finally:
        for logger, level in zip(found, levels, strict=True):
            logger.setLevel(level)
