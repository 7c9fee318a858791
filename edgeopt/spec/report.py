"""The report of a validation: what was measured, where, and each check's verdict with its evidence."""

from __future__ import annotations

from typing import Any, Literal

from edgeopt.spec.values import Value

Verdict = Literal["pass", "fail", "undecided"]


class Check(Value):
    """One thing judged: `value` against `limit`, both in the unit that the name ends with."""

    name: str
    verdict: Verdict
    value: float | None = None
    limit: float | None = None
    evidence: str = ""


class Interval(Value):
    """The 95 % confidence interval of a metric, in the metric's own unit, from so many samples."""

    low: float
    high: float
    samples: int
    method: Literal["wilson", "bootstrap", "normal"]


class Figure(Value):
    """A figure with its 95 % interval, taken over so many rounds."""

    value: float
    low: float
    high: float
    rounds: int


class CandidateResult(Value):
    """What the runner measured of one candidate; `failure` set where it gave no figures."""

    name: str
    runtime: str
    precision: str
    failure: str | None = None
    load_s: float | None = None
    first_call_ms: float | None = None
    p50_ms: float | None = None
    p90_ms: float | None = None
    p99_ms: float | None = None
    calls: int = 0
    noise: float | None = None  # half the relative spread of the rounds' medians
    rounds_ms: tuple[float, ...] = ()  # of each round the median of its calls, or ms an answer for throughput
    interval_ms: tuple[float, float] | None = None  # 95 %, of the median of the rounds
    answers_per_s: float | None = None  # throughput mode, where there are no percentiles of calls
    setting: dict[str, Any] | None = None  # what was tuned: {"threads", "streams", "flags"}
    tried: tuple[dict[str, Any], ...] = ()  # settings with their "ms"
    warm_up: dict[str, Any] | None = None  # {"calls", "seconds", "stable"}
    uncertain: str | None = None  # why the times are: other work on the machine
    peak_rss_mb: float | None = None
    max_ms: float | None = None  # the slowest measured call
    p90_interval_ms: tuple[float, float] | None = None  # 95 %, bootstrap over the rounds
    p99_interval_ms: tuple[float, float] | None = None
    fps: float | None = None  # calls a second at p50, or answers a second for throughput
    cold_start_ms: float | None = None  # loading and the first call
    peak_gpu_mb: float | None = None  # GPU memory of its process, where runtime or driver tells
    power_w: Figure | None = None  # of the whole board or package, mean while its calls ran
    peak_power_w: float | None = None
    energy_mj: Figure | None = None  # a call, everything that the board used meanwhile
    energy_above_idle_mj: Figure | None = None  # a call, less what the idle board uses in that time
    temperature_c: float | None = None  # the hottest sensor while its calls ran
    clocks_mhz: dict[str, float] = {}  # 'cpu', 'gpu': median while its calls ran
    throttled_rounds: int = 0  # of the rounds that count, those in which the device throttled
    drift_percent: Figure | None = None  # soak: median latency of the last quarter over that of the first, less 1
    size_bytes: int | None = None  # of its file
    metrics: dict[str, float] = {}
    intervals: dict[str, Interval] = {}  # of the metrics whose samples are known
    sqnr_db: float | None = None
    max_abs_error: float | None = None  # scaled: largest |r - x| over max(1, largest |r|)
    top1_agreement: float | None = None
    flags: tuple[dict[str, Any], ...] = ()  # {"flag", "status", "message"}

    @property
    def ms(self) -> float | None:
        """What candidates are chosen by: p50 of a call, or milliseconds an answer; None where nothing was timed."""
        return 1e3 / self.answers_per_s if self.answers_per_s else self.p50_ms


class Source(Value):
    """Where sensor readings came from: 'tegrastats', 'sysfs', 'nvml', 'nvidia-smi', 'rapl'; `message` says why not."""

    name: str
    status: Literal["ok", "missing", "failed"]
    message: str = ""


class Throttling(Value):
    """The device slowed itself down: the cause in words, and when, in seconds since the measurement began."""

    cause: str
    source: str  # 'cooling', 'over-current', 'current alarm', 'gpu clock', 'cpu clock', strongest evidence first
    first_s: float
    last_s: float
    rounds: int = 0  # measured rounds that it fell into
    left_out: int = 0  # of them, those that were measured again and do not count


class Conditions(Value):
    """The device while it was measured. None and empty mean that it does not say."""

    power_mode: str | None = None
    interval_s: float | None = None  # between two samples
    samples: int = 0
    sources: tuple[Source, ...] = ()
    idle_power_w: Figure | None = None  # before the first call; `rounds` counts samples here
    power_of: str | None = None  # what power and energy are of: 'VDD_IN', 'sum of VDD_GPU_SOC, VDD_CPU_CV, ...'
    temperatures_start_c: dict[str, float] = {}
    temperatures_peak_c: dict[str, float] = {}
    clocks_mhz: dict[str, float] = {}  # median over all measured calls
    clocks_max_mhz: dict[str, float] = {}
    throttling: tuple[Throttling, ...] = ()


class Moment(Value):
    """A row of a soak's time series: one turn of all candidates."""

    at_s: float  # since the measurement began
    ms: dict[str, float] = {}  # candidate -> median of its calls, or milliseconds an answer
    power_w: float | None = None
    temperature_c: float | None = None
    clocks_mhz: dict[str, float] = {}
    rss_mb: dict[str, float] = {}  # candidate -> resident memory of its process
    throttled: bool = False


class Report(Value):
    """`reports/*.json`. `simulated` marks figures from an emulator or a recording: never shown as the device's."""

    schema_version: int = 1
    artifact: str
    digest: str
    profile: str
    host: str
    when_utc: str  # ISO 8601, seconds
    verdict: Verdict
    chosen: str | None
    reason: str
    checks: tuple[Check, ...]
    candidates: tuple[CandidateResult, ...]
    environment: dict[str, Any]
    simulated: str | None = None
    conditions: Conditions | None = None
    series: tuple[Moment, ...] = ()  # where --duration asked for it
    seconds: float
