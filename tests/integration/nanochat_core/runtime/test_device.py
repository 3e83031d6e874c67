"""The device of a job, and what determinism "strict" sets before a GPU is touched."""

import json
import os
import subprocess
import sys

import pytest
import torch

from flows.identity.fingerprint import REPOSITORY
from nanochat_core.errors import ConfigError
from nanochat_core.runtime.hardware.device import open_device, use_device
from nanochat_core.worker import set_up_cublas
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
