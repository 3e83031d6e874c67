"""What stands in for CUDA where code is generated for it without a GPU."""

import os
import subprocess
from pathlib import Path
from typing import Any

import torch

# What torch's autograd asks of CUDA although nothing runs: one device, and that all is well.
STUB = """
int cudaGetDeviceCount(int *n) { *n = 1; return 0; }
int cudaGetDevice(int *d) { *d = 0; return 0; }
int cudaSetDevice(int d) { return 0; }
int cudaGetLastError(void) { return 0; }
int cudaPeekAtLastError(void) { return 0; }
int cudaDeviceGetStreamPriorityRange(int *a, int *b) { *a = 0; *b = -5; return 0; }
int cudaStreamIsCapturing(void *s, int *c) { *c = 0; return 0; }
int cudaThreadExchangeStreamCaptureMode(int *m) { return 0; }
int cudaStreamCreateWithPriority(void **s, unsigned f, int p) { *s = (void *)1; return 0; }
int cudaEventCreateWithFlags(void **e, unsigned f) { *e = (void *)1; return 0; }
int cudaEventRecord(void *e, void *s) { return 0; }
int cudaEventQuery(void *e) { return 0; }
int cudaEventDestroy(void *e) { return 0; }
int cudaStreamWaitEvent(void *s, void *e, unsigned f) { return 0; }
int cuInit(unsigned f) { return 0; }
int cuDevicePrimaryCtxGetState(int d, unsigned *f, int *a) { *f = 0; *a = 1; return 0; }
int cuCtxGetCurrent(void **c) { *c = (void *)1; return 0; }
int cuGetErrorString(int e, const char **s) { *s = "no GPU"; return 0; }
int cuGetProcAddress(const char *s, void **f, int v, unsigned long g) { *f = 0; return 500; }
int cuGetProcAddress_v2(const char *s, void **f, int v, unsigned long g, void *q) {
  *f = 0; return 500;
}
"""


def with_stub(directory: Path) -> dict[str, str]:
    """Build the library that stands in for CUDA's; return an environment that loads it."""
    source, library = directory / "stub.c", directory / "libcuda.so.1"
    source.write_text(STUB)
    name = f"-Wl,-soname,{library.name}"  # torch asks for it by this name
    subprocess.run(["cc", "-shared", "-fPIC", name, "-o", library, source], check=True)
    return {
        **os.environ,
        "LD_PRELOAD": str(library),
        "NANOCHAT_DTYPE": "bfloat16",
        "OMP_NUM_THREADS": "1",
    }


class Driver:
    """In place of CUDA's driver: names the target, and can launch nothing."""

    def get_current_target(self) -> Any:
        """Return what is compiled for."""
        from triton.backends.compiler import GPUTarget  # pyright: ignore[reportMissingImports]

        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        """Return a device number."""
        return 0

    def get_active_torch_device(self) -> torch.device:
        """Return the device that kernels are compiled for."""
        return torch.device("cuda", 0)
