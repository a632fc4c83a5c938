"""The environment variables of a runner that its engines get: listed ones that do not look like credentials. Pure.

Others, such as the key of a provider, reach an engine only by the setting `environment` of its model.
"""

import re
from collections.abc import Iterable, Mapping, Sequence

COMMON_VARIABLES = (
    *("PATH", "HOME", "USER", "LOGNAME", "SHELL", "HOSTNAME", "TERM", "TZ", "TMPDIR", "TEMP", "TMP"),
    *("LANG", "LANGUAGE", "LC_*", "LD_*", "DYLD_*", "NIX_LD*", "GLIBC_TUNABLES", "MALLOC_*", "XDG_*"),
    *("PYTHON*", "VIRTUAL_ENV", "CONDA_PREFIX", "DO_NOT_TRACK"),
    *("SSL_CERT_*", "REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE"),
    *(spell(f"{name}_proxy") for name in ("http", "https", "all", "no") for spell in (str.lower, str.upper)),
)
"""For every engine. A `*` at the end stands for any further characters."""
DEVICE_VARIABLES = (
    *("CUDA*", "CUBLAS_*", "CUDNN_*", "NVIDIA_*", "NCCL_*", "NVSHMEM_*"),
    *("HIP_*", "HSA_*", "ROCR_*", "ROCM_*", "ROCBLAS_*", "AMD_*", "GPU_DEVICE_ORDINAL", "MIOPEN_*", "RCCL_*"),
    *("ONEAPI_*", "SYCL_*", "UR_*", "ZE_*", "ZES_*", "OCL_ICD_*", "VK_*", "MESA_*", "RADV_*", "METAL_*", "MTL_*"),
    *("OMP_*", "GOMP_*", "KMP_*", "MKL_*", "OPENBLAS_*"),
)
"""For engines that compute on accelerators or with many threads."""
PYTORCH_VARIABLES = (
    *("TORCH*", "PYTORCH_*", "TRITON_*", "FLASHINFER_*", "DG_*", "TVM_*", "NUMBA_*", "GLOO_*"),
    *("HF_*", "HUGGINGFACE_HUB_CACHE", "DISABLE_TELEMETRY", "TRANSFORMERS_*", "TOKENIZERS_*", "SAFETENSORS_*"),
    *("CC", "CXX", "CPATH", "C_INCLUDE_PATH", "CPLUS_INCLUDE_PATH", "LIBRARY_PATH", "NVCC_*", "MAX_JOBS"),
)
"""For engines with PyTorch, which compile kernels and use the hub's libraries."""
_CREDENTIAL = re.compile(r"(^|_)(KEYS?|TOKEN|SECRET|PASSWORD|CREDENTIALS?)(_|$)", re.IGNORECASE)


def is_listed(name: str, listed: Iterable[str]) -> bool:
    """Whether a list has a variable."""
    return any(name.startswith(each[:-1]) if each.endswith("*") else name == each for each in listed)


def passed_variables(environment: Mapping[str, str], listed: Sequence[str]) -> dict[str, str]:
    """Returns the variables that an engine gets. `listed`: those of its runtime."""
    known = (*COMMON_VARIABLES, *listed)
    return {
        name: value for name, value in environment.items() if is_listed(name, known) and not _CREDENTIAL.search(name)
    }


def withheld_variables(environment: Mapping[str, str], listed: Sequence[str]) -> list[str]:
    """Returns the names of the other variables, those that look like credentials first."""
    passed = passed_variables(environment, listed)
    return sorted(environment.keys() - passed.keys(), key=lambda name: (not _CREDENTIAL.search(name), name))
