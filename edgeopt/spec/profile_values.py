"""The values of a hardware profile: facts of the target and what is wanted of it, no code.

`ProfileFile` is the format of a YAML file, `Profile` what it means once the facts of module and JetPack are
filled in; `profile.load_profile` goes from one to the other.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, get_args

from pydantic import BeforeValidator, Field, StrictBool, StrictFloat, StrictInt, StrictStr

from edgeopt.spec.limits import Limits
from edgeopt.spec.values import Value


def _quoted(value: Any) -> Any:
    if isinstance(value, int | float) and not isinstance(value, bool):
        raise ValueError(f'a version must be in quotes, as in "{value}": YAML reads an unquoted 3.10 as the number 3.1')
    return value


VersionText = Annotated[StrictStr, BeforeValidator(_quoted), Field(pattern=r"^\d+(\.\d+)*([.+a-z][0-9A-Za-z.+]*)?$")]
PrecisionName = Literal["fp32", "fp16", "bf16", "int8", "fp8"]
FuserTrial = Literal["onednn", "nnc", "nnc-dynamic", "nnc-cpu", "nnc-cpu-dynamic", "nvfuser", "unprofiled"]
BackendName = Literal["onnxruntime", "openvino", "torchscript", "aoti", "tensorrt"]
Mechanism = Literal["cpu", "weak-flags", "explicit-qdq", "strong-typed"]
Ranges = Literal["minmax", "moving-average", "percentile", "mse", "entropy"]
Improvement = Literal["equalize", "rounding", "biases"]
Placement = Literal["onnxruntime-x86", "onnxruntime-arm", "openvino", "tensorrt"]
# what passes/ fuses; activations after a convolution are fused by the runtimes
FusionPattern = Literal[
    "conv_bn",
    "linear_bn",
    "bn_conv",
    "bn_linear",
    "attention",
    "gelu",
    "silu",
    "layer_norm",
    "rms_norm",
    "parallel_matmuls",
    "sum_of_matmuls",
]
ALL_PATTERNS: tuple[FusionPattern, ...] = get_args(FusionPattern)


def _pass_setting(value: Any) -> Any:
    if not isinstance(value, bool | dict):
        raise ValueError(f"{value!r} is neither on, off, nor {{setting: value}}")
    return value


PassSetting = Annotated[  # on, off, or its settings
    StrictBool | dict[StrictStr, StrictBool | StrictInt | StrictFloat | StrictStr], BeforeValidator(_pass_setting)
]
# names in /proc/cpuinfo of the instructions that sum products of 8-bit integers in int32 at once
VNNI_FLAGS = frozenset({"avx512_vnni", "avx_vnni", "avx512vnni", "avxvnni", "avx_vnni_int8"})
Step = tuple[Literal["STATIC", "DYNAMIC"], Annotated[int, Field(strict=True, ge=0, le=100)]]
Argv = tuple[Annotated[StrictStr, Field(min_length=1)], ...]


class TorchRange(Value):
    """The torch versions that the target runs, both ends included."""

    min: VersionText | None = Field(None, description="oldest torch with a wheel for the target")
    max: VersionText | None = Field(None, description="newest torch with a wheel for the target")


class TargetFile(Value):
    """Facts of the target. With `module` they come from the table; what stands here replaces them."""

    kind: Literal["jetson", "desktop", "cpu"] | None = Field(None, description="class of machine")
    arch: Literal["aarch64", "x86_64"] | None = Field(None, description="as `uname -m` prints it")
    sm: VersionText | None = Field(None, description='compute capability of the GPU, as in "7.2"')
    l4t: VersionText | None = Field(None, description="Linux for Tegra release")
    python: VersionText | None = Field(None, description="Python on the target")
    torch: TorchRange | None = Field(None, description="torch versions that run there")
    tensorrt: VersionText | None = Field(None, description="TensorRT on the target")
    cuda: VersionText | None = Field(None, description="CUDA on the target")
    cudnn: VersionText | None = Field(None, description="cuDNN on the target")
    memory_gb: StrictInt | None = Field(None, ge=1, description="memory in GB, shared with the GPU on a Jetson")
    cpu_features: tuple[StrictStr, ...] | None = Field(None, description="names as in /proc/cpuinfo: avx2, asimddp")
    vnni: StrictBool | None = Field(
        None,
        description="x86: the CPU has AVX512-VNNI or AVX-VNNI, so 8-bit weights are exact; follows from cpu_features",
    )
    onnx_opset_max: StrictInt | None = Field(None, ge=7, le=30, description="newest ONNX opset that the target reads")


class Target(Value):
    """The resolved facts of a target, units in names; None where the target has no such thing."""

    kind: Literal["jetson", "desktop", "cpu"]
    arch: Literal["aarch64", "x86_64"]
    module: str | None = None
    sm: str | None = None
    l4t: str | None = None
    python: str | None = None
    torch: TorchRange | None = None
    tensorrt: str | None = None
    cuda: str | None = None
    cudnn: str | None = None
    memory_gb: int | None = None
    dla_cores: int = 0
    cpu_features: tuple[str, ...] = ()
    vnni: bool = False
    onnx_opset_max: int


class Precision(Value):
    """Which precisions may be tried. The fastest that keeps the accuracy is chosen by the gates."""

    allowed: tuple[PrecisionName, ...] = Field(("fp32",), min_length=1, description="precisions that may be built")
    keep_fp32: tuple[StrictStr, ...] = Field((), description="module paths or operator patterns kept in fp32")
    mechanism: Mechanism | None = Field(None, description="how precision is told to the runtime; follows from TensorRT")


class Fuser(Value):
    """TorchScript's process-wide fuser flags, applied on the device; null leaves torch's own value."""

    profiling_executor: StrictBool | None = Field(None, description="torch._C._jit_set_profiling_executor")
    profiling_mode: StrictBool | None = Field(None, description="torch._C._jit_set_profiling_mode")
    texpr_fuser: StrictBool | None = Field(None, description="torch._C._jit_set_texpr_fuser_enabled")
    texpr_reductions: StrictBool | None = Field(None, description="torch._C._jit_set_texpr_reductions_enabled")
    fuse_on_cpu: StrictBool | None = Field(None, description="torch._C._jit_override_can_fuse_on_cpu; needs LLVM")
    fuse_on_gpu: StrictBool | None = Field(None, description="torch._C._jit_override_can_fuse_on_gpu")
    nvfuser: StrictBool | None = Field(None, description="torch._C._jit_set_nvfuser_enabled; torch 1.11 to 2.1")
    onednn_fusion: StrictBool | None = Field(None, description="torch.jit.enable_onednn_fusion; torch 2.1 and later")
    optimize_for_inference: StrictBool | None = Field(None, description="run after loading, never before saving")
    trials: StrictBool | tuple[FuserTrial, ...] = Field(
        False, description="combinations of flags that are candidates of their own: on, off, or their names"
    )


class Fusion(Value):
    """Depth of TorchScript's specialisation, and the patterns that the graph passes may fuse."""

    strategy: tuple[Step, ...] = Field((), description="torch.jit.set_fusion_strategy; torch 1.11 and later")
    patterns: tuple[FusionPattern, ...] = Field(ALL_PATTERNS, description="patterns fused before lowering")


class Quantization(Value):
    """How int8 is done; what is left out follows from the target."""

    placement: Placement | None = Field(None, description="whose kernels the Q/DQ pairs are placed for")
    activations: Literal["uint8-asymmetric", "int8-symmetric"] | None = Field(None, description="activation scheme")
    weight_bits: Literal[7, 8] | None = Field(None, description="7 where int16 sums may saturate (x86 without VNNI)")
    per_channel: StrictBool = Field(True, description="one scale an output channel for weights")
    ranges: Ranges = Field("minmax", description="range estimate")
    improve: tuple[Improvement, ...] = Field(
        ("equalize", "rounding"), description="methods without labels that keep the accuracy"
    )
    dynamic: StrictBool = Field(
        True, description="onnxruntime: offer LSTMs with int8 weights, scales found at run time"
    )


class Measure(Value):
    """What the fastest candidate is: the one with the shortest call, or the one with the most answers a second."""

    mode: Literal["latency", "throughput"] = Field("latency", description="what candidates are chosen by")
    streams: StrictInt | None = Field(
        None, ge=1, le=64, description="throughput: programs that answer at once; found by trial where it is not given"
    )
    tune: StrictBool = Field(True, description="find threads, spinning and streams by trial")


class Container(Value):
    """The image in which this target's artifacts are tried or run."""

    dockerfile: StrictStr | None = Field(None, description="a file of docker/")
    base: StrictStr | None = Field(None, description="base image")


class ProfileFile(Value):
    """The format of a profile's YAML file."""

    title: StrictStr | None = Field(None, description="one line for people")
    base: StrictStr | None = Field(None, description="a shipped profile to start from: NAME or NAME@JETPACK")
    module: StrictStr | None = Field(None, description="Jetson module whose facts apply")
    jetpack: VersionText | None = Field(None, description='JetPack of the module, as in "5.1"')
    target: TargetFile = TargetFile()
    precision: Precision = Precision()
    fuser: Fuser = Fuser()
    fusion: Fusion = Fusion()
    quantization: Quantization = Quantization()
    backends: tuple[BackendName, ...] = Field(("onnxruntime",), min_length=1, description="in order of preference")
    passes: dict[str, PassSetting] = Field({}, description="graph pass -> on, off, or {setting: value}")
    container: Container | None = None
    measure: Measure = Measure()
    limits: Limits = Limits()
    root: StrictStr | None = Field(None, description="where releases live on the device, else ~/.edgeopt")
    dla: StrictBool = Field(False, description="let TensorRT use the DLA cores")
    after_activate: Argv = Field((), description="command run after a switch, as a list of words")
    health: Argv = Field((), description="command whose exit status decides whether a switch stays")


class ResolvedQuantization(Value):
    """`Quantization` with every choice made."""

    placement: Placement
    activations: Literal["uint8-asymmetric", "int8-symmetric"]
    weight_bits: Literal[7, 8]
    per_channel: bool
    ranges: Ranges
    dynamic: bool = True
    improve: tuple[Improvement, ...] = ("equalize", "rounding")


class ResolvedPrecision(Value):
    """`Precision` with its mechanism."""

    allowed: tuple[PrecisionName, ...]
    keep_fp32: tuple[str, ...]
    mechanism: Mechanism


class Profile(Value):
    """A profile whose facts are filled in. `notes`: what was left out or may go wrong, and why."""

    name: str
    title: str
    source: str = Field(exclude=True)
    jetpack: str | None
    target: Target
    precision: ResolvedPrecision
    fuser: dict[str, Any]
    fuser_trials: bool | tuple[FuserTrial, ...] = False
    fusion: Fusion
    quantization: ResolvedQuantization
    backends: tuple[BackendName, ...]
    passes: dict[str, PassSetting]
    container: Container | None
    measure: Measure = Measure()
    limits: Limits
    root: str | None
    dla: bool
    after_activate: tuple[str, ...]
    health: tuple[str, ...]
    notes: tuple[str, ...] = ()

    @property
    def fuser_flags(self) -> dict[str, Any]:
        """`fuser` and `fusion.strategy` as one table of flags, as a TorchScript candidate carries it."""
        flags = dict(self.fuser)
        if self.fusion.strategy:
            flags["fusion_strategy"] = [list(step) for step in self.fusion.strategy]
        return flags
