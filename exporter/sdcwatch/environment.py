"""What decides a rank's bits besides its inputs: hardware model, library versions, determinism flags.

Ranks exchange a digest of this; a suspect whose environment differs from its majority's is `software`, never a broken
machine (design rule 6). Never contains anything that legitimately differs between healthy ranks (host, rank, port,
UUID).
"""

from __future__ import annotations

import functools
import os
import platform
from collections.abc import Callable
from typing import Any

import torch

from sdcwatch._version import __version__
from sdcwatch.fingerprint import FORM, digest_bytes

#: Variables that change which kernel or algorithm computes a number.
VARIABLES = (
    "ATEN_CPU_CAPABILITY", "CUBLAS_WORKSPACE_CONFIG", "CUBLASLT_WORKSPACE_SIZE", "CUDA_LAUNCH_BLOCKING",
    "DNNL_DEFAULT_FPMATH_MODE", "MKL_CBWR", "MKL_ENABLE_INSTRUCTIONS", "NCCL_ALGO", "NCCL_MAX_NCHANNELS",
    "NCCL_PROTO", "NCCL_NVLS_ENABLE", "NVIDIA_TF32_OVERRIDE", "ONEDNN_MAX_CPU_ISA", "OPENBLAS_CORETYPE",
    "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE", "TORCH_CUDNN_V8_API_DISABLED",
)  # fmt: skip


def describe(device: torch.device) -> dict[str, str]:
    """The environment of this process for work on `device`, as sorted text pairs."""
    facts: dict[str, Any] = {
        "sdcwatch": __version__,
        "fingerprint": FORM,
        "python": platform.python_version(),
        "machine": platform.machine(),
        "torch": torch.__version__,
        "torch.git": torch.version.git_version,
        "device": device.type,
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "matmul_precision": _asked(torch.get_float32_matmul_precision),
        "fp32_precision": _precisions(),
    }
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        facts |= {
            "gpu": properties.name,
            "capability": f"{properties.major}.{properties.minor}",
            "cuda": torch.version.cuda,
            "cudnn": torch.backends.cudnn.version(),
            "cudnn.benchmark": torch.backends.cudnn.benchmark,
            "cudnn.deterministic": torch.backends.cudnn.deterministic,
            "tf32.matmul": _asked(lambda: torch.backends.cuda.matmul.allow_tf32),
            "tf32.cudnn": _asked(lambda: torch.backends.cudnn.allow_tf32),
            "nccl": ".".join(map(str, torch.cuda.nccl.version())) if torch.distributed.is_nccl_available() else "none",
            "driver": _driver(),
        }
    else:
        facts |= {
            "cpu": torch.backends.cpu.get_cpu_capability(),
            "threads": torch.get_num_threads(),
            "mkldnn": torch.backends.mkldnn.is_available(),
        }
    facts |= {name: os.environ[name] for name in VARIABLES if name in os.environ}
    return {key: str(value) for key, value in sorted(facts.items())}


def digest(facts: dict[str, str]) -> int:
    """The uint64 that rows carry."""
    return digest_bytes("\n".join(f"{k}={v}" for k, v in sorted(facts.items())).encode())


def _asked(question: Callable[[], Any]) -> Any:
    """torch refuses to answer about old precision switches once a new one was used; `_precisions` holds those."""
    try:
        return question()
    except RuntimeError:
        return "unreadable"


def _precisions() -> str:
    """The newer switches (`torch.backends...fp32_precision`), where this torch has them."""
    backends: Any = torch.backends
    places = (backends, backends.cuda.matmul, backends.cudnn, backends.mkldnn)
    return ",".join(str(_asked(functools.partial(getattr, place, "fp32_precision", "none"))) for place in places)


def _driver() -> str:
    try:
        with open("/proc/driver/nvidia/version", encoding="utf-8") as file:
            return file.readline().strip()
    except OSError:
        return "unknown"
