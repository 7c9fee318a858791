"""TorchScript's fuser flags: applied one by one, each checked by trying it, and restored in reverse order.

The flags are process-wide and differ between torch versions; a function that exists may still refuse its
value or ignore it (nvfuser: raises in 1.10.2 without a GPU, does nothing in 2.13). So each is called in `try`
and read back. Looked up in the aarch64 wheels of torch 1.10.2, 1.11, 2.1.2, 2.2.2, 2.5.1, 2.10 and 2.13.
"""

import contextlib
import warnings

# flag -> (module, setter, getter); getter None where the setter itself returns the value that stood before
_FLAGS = {
    "profiling_executor": ("_C", "_jit_set_profiling_executor", None),
    "profiling_mode": ("_C", "_jit_set_profiling_mode", None),
    "texpr_fuser": ("_C", "_jit_set_texpr_fuser_enabled", "_jit_texpr_fuser_enabled"),
    "texpr_reductions": ("_C", "_jit_set_texpr_reductions_enabled", "_jit_texpr_reductions_enabled"),
    "fuse_on_cpu": ("_C", "_jit_override_can_fuse_on_cpu", "_jit_can_fuse_on_cpu"),
    "fuse_on_gpu": ("_C", "_jit_override_can_fuse_on_gpu", "_jit_can_fuse_on_gpu"),
    "nvfuser": ("_C", "_jit_set_nvfuser_enabled", "_jit_nvfuser_enabled"),
    "fusion_strategy": ("jit", "set_fusion_strategy", None),
    "onednn_fusion": ("jit", "enable_onednn_fusion", "onednn_fusion_enabled"),
}

# Without LLVM the CPU fuser raises at run time, or interprets: 88 to 134 ms for eager's 0.1 ms (torch 2.1.2).
_NO_LLVM = "this torch has no LLVM, and without it fusion on the CPU fails or runs a thousand times slower"


def apply(torch, flags):
    """Set `flags` (name -> value) in this process; returns (records, undo).

    A record is {"flag", "value", "status", "message"}: status 'applied'; 'missing' where this torch does not
    have it; 'refused' where it does not take the value. `undo()` sets the values that stood before.
    """
    records, undone = [], []
    for flag, value in flags.items():
        status, message = _apply_one(torch, flag, value, undone)
        records.append(record(flag, value, status, message))

    def undo():
        with _silenced():
            while undone:
                undone.pop()()

    return records, undo


def record(flag, value, status, message=""):
    return {"flag": flag, "value": value, "status": status, "message": message}


def _apply_one(torch, flag, value, undone):
    if flag not in _FLAGS:
        return "missing", "the runner does not know this flag"
    if flag == "fuse_on_cpu" and value and not _has_llvm(torch):
        return "refused", _NO_LLVM
    module_name, setter_name, getter_name = _FLAGS[flag]
    module = getattr(torch, module_name)
    setter, getter = getattr(module, setter_name, None), getattr(module, getter_name or "", None)
    if setter is None:
        return "missing", "torch %s has no %s" % (torch.__version__, setter_name)
    try:
        with _silenced():
            before = _set(setter, getter, value)
            now = getter() if getter else _set(setter, None, value)
    except Exception as error:  # whatever a version throws is the answer to "does it take this value"
        return "refused", "%s: %s" % (type(error).__name__, str(error).strip().split("\n")[0])
    if now is None:  # a stub that was left behind: nvfuser from torch 2.2 on
        return "missing", "torch %s no longer has %s" % (torch.__version__, flag)
    undone.append(lambda: setter(before))
    if _plain(now) != _plain(value):
        return "refused", "torch %s ignores it: it reads back as %r" % (torch.__version__, now)
    return "applied", ""


@contextlib.contextmanager
def _silenced():
    """TorchScript as a whole is deprecated in 2.13; on a device nobody can act on that."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def _set(setter, getter, value):
    """Set and return the value that stood before."""
    if getter is None:
        return setter(_native(value))
    before = getter()
    setter(_native(value))
    return before


def _has_llvm(torch):
    check = getattr(torch._C, "_llvm_enabled", None)
    return bool(check and check())


def _native(value):
    """JSON's lists of lists as the list of tuples that set_fusion_strategy takes."""
    return [tuple(pair) for pair in value] if isinstance(value, (list, tuple)) else value


def _plain(value):
    return [list(pair) for pair in value] if isinstance(value, (list, tuple)) else value
