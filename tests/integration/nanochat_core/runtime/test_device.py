"""The device of a job, what determinism "strict" sets on a GPU, functions that torch compiles."""

import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from flows.identity.fingerprint import REPOSITORY
from nanochat_core.errors import ConfigError
from nanochat_core.model.gpt import GPT
from nanochat_core.model.native.kernels import load as native_loss
from nanochat_core.optim.sharded import Optimizer
from nanochat_core.runtime.hardware.compile import compiled
from nanochat_core.runtime.hardware.device import VML, choose_vml_kernels, open_device, use_device
from nanochat_core.runtime.hardware.distributed import ALONE
from nanochat_core.scaling import model_for_depth, numerics, optimizer_for
from nanochat_core.worker import set_up_cublas
from tests.support.nanochat_core.optim.ranks import add_gradients
from tests.support.small_job import one_thread, small_job

pytestmark = pytest.mark.torch
# A stage that returns what cuBLAS is set to, and whether torch's compiler was imported.
SEEN = """
import os
import sys

from nanochat_core.runtime.hardware.device import open_device

def run(job):
    open_device(job.resources)
    compiler = "torch._inductor" in sys.modules
    return {"cublas": os.environ.get("CUBLAS_WORKSPACE_CONFIG"), "compiler": compiler}
"""


@pytest.fixture(autouse=True)
def _settings_are_put_back(monkeypatch):
    # Set, then deleted: so that it is taken away again whatever sets it meanwhile.
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", "")
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG")
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)
    torch.use_deterministic_algorithms(False)


def resources(determinism, *, device="cuda"):
    return one_thread(device=device, determinism=determinism)


def job(directory, determinism):
    return small_job(directory, entry="seen", resources=resources(determinism, device="cpu"))


def test_only_a_strict_job_sets_cublas_and_pays_for_importing_the_compiler(tmp_path):
    (tmp_path / "seen.py").write_text(SEEN)
    found = {"default": (None, False), "strict": (":4096:8", True)}
    directories = [tmp_path / determinism for determinism in found]
    for directory in directories:
        directory.mkdir()
    jobs = [str(job(path, path.name).write()) for path in directories]
    code = "import sys; from nanochat_core.worker import main; sys.exit(any(map(main, JOBS)))"
    command = [sys.executable, "-c", code.replace("JOBS", str([[path] for path in jobs]))]
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    subprocess.run(command, check=True, env=environment, cwd=REPOSITORY)
    for path in directories:
        metrics = json.loads((path / "result.json").read_text())["metrics"]
        assert (metrics["cublas"], metrics["compiler"]) == found[path.name]


def test_a_persons_own_setting_of_cublas_stays(monkeypatch, tmp_path):
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":16:8")
    set_up_cublas(job(tmp_path, "strict"))
    assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":16:8"


@pytest.mark.parametrize("determinism", ["strict", "default"])
def test_torch_refuses_what_does_not_repeat_itself_only_if_strict(determinism):
    open_device(resources(determinism, device="cpu"))
    assert torch.are_deterministic_algorithms_enabled() == (determinism == "strict")


def test_a_gpu_that_is_not_there_is_a_persons_mistake(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ConfigError, match="asks for a GPU"):
        open_device(resources("default"))


def test_a_rank_makes_its_own_gpu_current_before_it_meets_the_others(monkeypatch):
    used = []
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.set_device", used.append)
    monkeypatch.setattr("torch.distributed.init_process_group", lambda *_, **__: pytest.fail("met"))
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE"):
        monkeypatch.setenv(name, "3")
    assert open_device(resources("default")) == torch.device("cuda", 3)
    assert used == [torch.device("cuda", 3)]


def test_a_thread_takes_its_gpu_and_a_cpu_is_not_chosen(monkeypatch):
    used = []
    monkeypatch.setattr("torch.cuda.set_device", used.append)
    use_device(torch.device("cpu"))
    use_device(torch.device("cuda", 1))
    assert used == [torch.device("cuda", 1)]


# MKL's vector functions are called by one thread before several threads call them together.

MODEL = model_for_depth(1, sequence_len=128, vocab_size=256)
OPTIMIZER = optimizer_for(MODEL, tokens=1, reference_tokens=1, total_batch_size=256)
# aten/src/ATen/cpu/vml.h and UnaryOpsKernel.cpp of torch 2.13: every function that may be VML's.
MAY_BE_VML = {
    *("acos", "asin", "atan", "cos", "erf", "erfc", "erfinv", "exp", "expm1", "lgamma"),
    *("log", "log10", "log1p", "log2", "sin", "sinh", "sqrt", "tan", "tanh"),
}


class Calls(TorchDispatchMode):
    """Records (function, elements) of every call of one of these functions, in order."""

    def __init__(self):
        super().__init__()
        self.found = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.overloadpacket.__name__.rstrip("_")
        if name in MAY_BE_VML:
            self.found.append((name, args[0].numel()))
        return func(*args, **kwargs or {})


def test_a_training_step_calls_no_vector_function_that_the_model_did_not_call_first():
    choose_vml_kernels.cache_clear()
    with Calls() as calls:
        model = GPT(MODEL, numerics("fp32"))
        first = list(calls.found)
        model.init_weights(1)
        optimizer = Optimizer(model, OPTIMIZER, precision="fp32", world=ALONE)
        tokens = torch.arange(2 * 129).view(2, 129) % 256
        add_gradients(model, optimizer, tokens, torch.ones_like(tokens), device_batch_size=2)
        optimizer.step(lr_multiplier=1.0, momentum=0.9, weight_decay=0.0)
    assert sorted(first) == sorted((function.__name__, 1) for function in VML for _ in "fp")
    of_step = {name for name, elements in calls.found[len(first) :] if elements > 1}
    assert {"cos", "sin"} <= of_step  # or the record would be empty
    assert "exp" in of_step or native_loss() is not None  # the compiled loss calls no exp of torch
    assert of_step <= {name for name, _ in first}


def test_a_model_without_memory_calls_them_too():
    choose_vml_kernels.cache_clear()
    with torch.device("meta"):
        GPT(MODEL, numerics("fp32"))
    assert choose_vml_kernels.cache_info().currsize == 1


# How many kernels functions get that torch compiles.


@pytest.fixture(params=["strict", "default"])
def strict(request):
    """Yield True where torch's operations have to be deterministic; forget what was compiled."""
    torch.use_deterministic_algorithms(request.param == "strict")
    torch._dynamo.reset()
    yield request.param == "strict"
    torch._dynamo.reset()
    torch.use_deterministic_algorithms(False)


def test_strict_functions_are_compiled_for_each_shape_in_any_thread(strict, monkeypatch):
    graphs = []

    def backend(graph, _):
        graphs.append(graph)
        return graph

    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend=backend))
    double = compiled(lambda x: 2 * x)

    def run():
        for size in range(3, 15):  # more than torch compiles by default
            double(torch.ones(size))

    with ThreadPoolExecutor(1) as thread:  # as autograd runs backward passes on a GPU
        thread.submit(run).result()
    assert len(graphs) == (12 if strict else 2)
