"""What trtexec prints, read: how far a build has come, and why it failed, in one sentence.

With --verbose TensorRT says how many layers are left after it has fused them ('After concat removal: 9 layers'), and
'Computing costs for' before it tries kernels for each. Lines as in the logs of NVIDIA/TensorRT issues 3355 (8.5.2),
3747 (8.6.3) and of OE4T/meta-tegra pull request 2243 (10.16.2).
"""

import re

_LAYERS = re.compile(r"After [\w -]+: (\d+) layers")
_BUILT = re.compile(r"Engine (?:built|generation completed) in ([\d.]+)")
_COSTS = "=============== Computing costs for"
_PARSED_SHARE, _TRIED_SHARE = 0.02, 0.95  # of the time: reading the file, and all but the writing of the engine

# (pattern in the log, kind, sentence); the first that matches any line is the reason. A tactic that is skipped for want
# of memory and a layer that leaves the DLA are warnings, [W], of builds that succeed.
_REASONS = (
    (r"could not find plugin:? ?(\S+)", "operator", "this TensorRT has no operator %s, and no plugin brings it"),
    (r"[Nn]o space left on device", "space", "the disk of the device is full: free space and ask again"),
    (r"Static model does not take explicit shapes", "recipe", "the file's sizes are fixed, and the recipe gives some"),
    (r"Unknown option: (.*)", "option", "this trtexec does not know the option %s"),
    (r"\[E\].*DLA.*(?:not supported|invalid|failed)", "dla", "the DLA does not take this model: see the log"),
    (r"(?:out of memory|OutOfMemory|std::bad_alloc|[Cc]uda failure: 2\b)", "memory", "not enough memory: stop other "
     "programs, or add a swap file"),
    (r"\[E\].*insuff?icient memory", "memory", "not enough memory for any kernel of a layer: stop other programs"),
)  # fmt: skip


class Progress:
    """How far a build is, fed line by line: `share` from 0 to 1 and `stage`, a few words."""

    def __init__(self):
        self.share = 0.0
        self.stage = "starting"
        self.seconds = None
        self._layers = self._tried = 0

    def feed(self, line):
        if "Start parsing network model" in line:
            self.stage = "reading the file"
        elif "Finish" in line and "parsing network model" in line:
            self._at(_PARSED_SHARE, "arranging layers")
        elif _COSTS in line:
            self._tried += 1
            share = min(1.0, self._tried / float(self._layers)) if self._layers else 0.0
            words = "trying kernels, layer %d of %d" % (min(self._tried, self._layers), self._layers)
            self._at(
                _PARSED_SHARE + share * (_TRIED_SHARE - _PARSED_SHARE), words if self._layers else "trying kernels"
            )
        elif _LAYERS.search(line) and not self._tried:
            self._layers = int(_LAYERS.search(line).group(1))
        elif "Total Activation Memory" in line and self._tried:
            self._at(_TRIED_SHARE, "writing the engine")
        elif _BUILT.search(line):
            self.seconds = float(_BUILT.search(line).group(1))
            self._at(0.99, "writing the engine")

    def _at(self, share, stage):
        self.share, self.stage = max(self.share, share), stage


def is_verbose(line):
    """Whether the line is one of the thousands that --verbose adds."""
    return "[V]" in line[:40]


def failure(lines, status):
    """(kind, sentence) of a build that ended with `status` and these last lines of its log."""
    if status == -9:
        return (
            "memory",
            "the system killed TensorRT's builder, most likely for want of memory: stop other programs, or"
            " add a swap file",
        )
    operator = _operator(lines)
    if operator:
        return "operator", "this TensorRT has no operator %s, and no plugin brings it" % operator
    for pattern, kind, sentence in _REASONS:
        for line in lines:
            found = re.search(pattern, line)
            if found:
                return kind, sentence % found.groups() if found.groups() else sentence
    if status < 0:
        return "killed", "TensorRT's builder was ended by signal %d" % -status
    errors = [line for line in lines if "[E]" in line]
    words = re.sub(r"^.*?\[E\]\s*", "", errors[0]).strip() if errors else "it gave no reason"
    return "build", "TensorRT cannot build the engine: %s" % words[:300]


def _operator(lines):
    """The operator that the parser gave up at: a plugin that is found after 'No importer registered' is no failure."""
    if not any(
        re.search(r"[Pp]lugin not found|could not find plugin|checkFallbackPluginImporter", line) for line in lines
    ):
        return None
    for pattern in (r"could not find plugin:? ?([\w.]+)", r"operator: (\w+)", r"No importer registered for op: (\w+)"):
        found = [m.group(1) for m in (re.search(pattern, line) for line in lines) if m]
        if found:
            return found[-1]
    return None


def failure_of_run(lines, status):
    """(kind, sentence) of an engine that did not run."""
    kind, sentence = failure(lines, status)
    if re.search(r"[Vv]ersion tag|incompatible device|not compatible with this version|Magic tag", " ".join(lines)):
        return "load", "the engine was made for another GPU or TensorRT: run 'edgeopt prepare ARTIFACT HOST'"
    return kind, sentence.replace("TensorRT cannot build the engine", "TensorRT cannot run the engine").replace(
        "TensorRT's builder", "trtexec"
    )
